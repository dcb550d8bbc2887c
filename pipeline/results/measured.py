"""The result of rows: the answer, what to do, tables, facts and notes, for ``run`` and in part for ``benchmark``."""

import itertools
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from pipeline.experiment.reported import single_names
from pipeline.results import statements, texts
from pipeline.results.advice import advise
from pipeline.results.breakdown import describe_step, parts_table
from pipeline.results.goodput import Goodput
from pipeline.results.losses import describe_statistics, find_statistics
from pipeline.results.record import Fact, Result, Table, format_fact
from pipeline.results.speedup import Row, facts_of, find_main, is_wide
from pipeline.wording import counted, duration, figure, join_names

NONE = "-"
_MOST_METRICS = 4
_LAUNCHERS = {"ray": "Ray", "inprocess": "in this process"}
_TEST, _VALIDATION, _LOSS = "test/", "validation/", "train/loss"
Missing = Literal["", "no baseline", "interrupted", "failed"]
"""Why no baseline was measured: none was asked for, or it was interrupted, or it failed."""


class Entry(NamedTuple):
    """A row of the table that was not measured, e.g. a predicted one."""

    key: str
    name: str
    cells: Mapping[str, Fact | str]  # Cells by the keys of facts; others are empty


def speedup_table(entries: Sequence[Row | Entry], *, main: Row, notes: Iterable[str] = ()) -> Table:
    """Return the table of throughput, speedup and loss, the losses that differ explained in notes below."""
    rows = [entry for entry in entries if isinstance(entry, Row)]
    ratios = [ratio for row in rows if (ratio := row.ratio) is not None]
    has_intervals = any(not ratio.is_clear or is_wide(ratio) for ratio in ratios)
    start_s = main.start_s or 0.0
    columns = {"devices": "cores" if main.trial.device == "cpu" else "GPUs", "samples_per_second": "samples/s"}
    if has_intervals:
        columns["speedup"] = f"speedup ({100 * main.confidence:g}% CI)"
    elif ratios:
        columns |= {"speedup": "speedup"} | ({} if main.claim == "invalid" else {"efficiency": "efficiency"})
        columns |= {"estimated_training_s": "est. time"} if main.result.whole_training else {}
    checks = {row.key: check for row in rows if (check := row.loss_check) is not None}
    columns |= {"loss": "loss"} if checks else {}
    sentences = list(dict.fromkeys(check.sentence for check in checks.values() if check.sentence))
    if main.claim == "invalid":  # which the answer itself says
        sentences.remove(checks[main.key].sentence)
    lines = []
    for entry in entries:
        cells: dict[str, Fact | str]
        if isinstance(entry, Entry):
            cells = dict(entry.cells)
        else:
            cells = {}
            for key, fact in facts_of(entry, start_s=start_s).items():  # an interval where it has room, or must be seen
                has_interval = has_intervals if key == "speedup" else fact.is_wide
                cells[key] = fact if has_interval else fact.model_copy(update={"low": None, "high": None})
            cells["devices"] = str(entry.device_count)
            if entry.key in checks:
                said = checks[entry.key].sentence
                number = f"[{sentences.index(said) + 1}]" if said in sentences else "differs"
                cells["loss"] = number if said else "same"
        name = entry.name if isinstance(entry, Entry) else entry.label
        lines.append((name, *(cells.get(key, NONE) for key in columns)))
    return Table(
        header=("", *columns.values()),
        rows=tuple(lines),
        emphasis=next((index for index, entry in enumerate(entries) if entry is main), None),
        notes=(*(f"[{number}] {sentence}" for number, sentence in enumerate(sentences, start=1)), *notes),
    )


def memory_table(rows: Sequence[Row]) -> Table | None:
    """Return memory, startup and use of the devices, as far as any row has them."""
    keys = ("peak_memory_mb", "held_mb", "time_to_first_step_s", "compile_s", "gpu_utilization", "tflops", "mfu")
    facts = [facts_of(row) for row in rows]
    known = [key for key in keys if any(own[key].value is not None for own in facts)]
    if not known:
        return None
    named = {
        **{key: facts[0][key].label for key in known},
        **({"peak_memory_mb": "peak memory/device, MiB"} if "peak_memory_mb" in known else {}),
    }
    held = [(row.name, row.result.held) for row in rows if row.result.held is not None]
    notes = [f"{name}: {one.cut} are sharded across ranks." for name, one in held if one.cut]
    if samples := rows[-1].result.whole_training:
        notes.append(texts.ESTIMATE.format(samples=f"{samples:,}"))
    return Table(
        title="Memory and startup",
        header=("configuration", *(named[key] for key in known)),
        rows=tuple((row.label, *(own[key] for key in known)) for row, own in zip(rows, facts, strict=True)),
        notes=tuple(notes),
        is_folded=True,
    )


def iter_decision(main: Row, *, command: str) -> Iterator[tuple[str, str]]:
    """Yield what to do about a doubtful speedup, see `Result.next`; a script and torchrun have no ``command``."""
    given = [*map(shlex.quote, shlex.split(command))] or ["pipeline", "run", "FILE"]
    if main.claim == "invalid":
        settings = ("train.precision=fp64", *(["train.epochs=1"] if main.role == "main" else []))
        yield "CHECK", texts.CHECK
        yield "CONFIRM", _repeat(given, given[1], *settings)
    elif main.claim == "inconclusive":
        doubt = statements.explain_doubt(main, main=main)
        yield "REASON", doubt.reason
        if doubt.command:
            yield "NEXT", doubt.remedy
            verb, *changed = doubt.command
            if command or verb != "run":
                yield "", _repeat(given, verb, *changed)
            elif changed:
                yield "", " ".join(changed)


def _repeat(given: Sequence[str], verb: str, *settings: str) -> str:
    """Return the command again with other settings, overrides or options; another verb has the overrides only."""
    taken, words = {word.partition("=")[0] for word in settings}, list[str]()
    for before, word in itertools.pairwise(given[1:]):
        is_option = word.startswith("-") or before.startswith("--")
        is_taken = word.partition("=")[0] in taken or (before in taken and before.startswith("--"))
        if not is_taken and not (verb != given[1] and is_option):
            words.append(word)
    return " ".join(["pipeline", verb, *words, *settings])


def iter_notes(rows: Sequence[Row], main: Row, *, has_advice: bool) -> Iterator[str]:
    """Yield notes on measured rows, the most important first."""
    result = main.result
    yield from (f"{note[0].upper()}{note[1:]}." for note in result.data_notes)
    if main.claim in ("faster", "inconclusive") and not has_advice:
        yield from (statements.compare(main, row) for row in rows if row.has_all_cores and row.cores >= main.cores)
    if main.claim != "invalid" and not has_advice and result.parts.sum_ms is not None:
        yield describe_step(main)
    doubt = statements.explain_doubt(main, main=main) if main.claim == "inconclusive" else None
    ratios = [ratio for row in rows if (ratio := row.ratio) is not None]
    if doubt is None and any(map(is_wide, ratios)) and (result.other_cores or 0.0) > statements.BUSY:
        yield texts.BUSY.format(cores=f"{result.other_cores:.1f}")
    for row in rows:
        if (parts := row.result.micro_batches) is not None:
            samples = counted(row.batch, "sample")
            yield texts.MICRO_BATCHES.format(name=row.name, samples=samples, parts=parts)
    if (check := main.loss_check) is None or check.state in ("same", "drifts"):  # else it is a reason of the other loss
        for kind in find_statistics(result):
            if kind.startswith("buffer"):
                statistics = describe_statistics(kind)
                yield texts.BUFFERS.format(statistics=f"{statistics[0].upper()}{statistics[1:]}")
    for row in rows:
        if row.role == "cell" and row is not main and row.claim == "inconclusive":
            yield f"{statements.verdict(row)}. {statements.explain_doubt(row, main=main).reason}."
    if any(row.batch != rows[0].batch for row in rows):
        yield texts.OTHER_BATCHES
    if (exchange := result.communication) is not None and exchange.worst is not None:
        spikes, lost = counted(exchange.spikes, "spike"), duration(exchange.lost_s)
        yield texts.SPIKES.format(spikes=spikes, lost=lost, worst=exchange.worst.sentence)
    if result.flops is not None and result.flops.uncounted:
        yield texts.UNCOUNTED.format(names=join_names(result.flops.uncounted))


def result_of_run(
    rows: Sequence[Row],
    *,
    hardware: str,
    command: str = "",
    goodput: Goodput | None = None,
    happened: Sequence[str] = (),
    missing: Missing = "",
    option: str = "",
    cores: int | None = None,
) -> Result:
    """Return the result of a training, and of what it was compared with; it has no ``run`` and no ``places`` yet."""
    main = find_main(rows)
    result, train_only = main.result, bool(option)
    next_steps = tuple(iter_decision(main, command=command))
    has_remedy = any(text.startswith("pipeline ") for _, text in next_steps)
    own = () if train_only or main.claim == "invalid" or has_remedy else rows
    advice = advise(own, main, experiment=main.trial.experiment, cores=cores) if own else ()
    ended = "stopped early" if result.stopped_early else "completed"
    title = texts.TITLES[ended].format(
        name=main.trial.experiment.name,
        epochs=f"{counted(result.epochs, 'epoch')}, " if result.epochs else "",
        steps=counted(result.steps, "step", spec=","),
        hardware=shorten_hardware(hardware),
    )
    answer, short = list[str](), ""
    if main.claim == "none":
        why = "option" if option else "one device" if main.is_one_replica_dp else missing or "same"
        reason = texts.UNMEASURED[why].format(option=option)
        answer = [texts.WITHOUT_SPEEDUP.format(name=main.name, rate=format_rate(main), reason=reason)]
        metric = next(iter(single_names(iter_metric_names(main))), "")
        reached = f"{metric} {figure(result.metrics[metric])}" if metric else f"{format_rate(main)} samples/s"
        short = texts.WITHOUT_SPEEDUP_VERDICT.format(name=main.name, reached=reached)
        answer = [*format_metrics(main), *answer]
    else:
        answer, short = [*statements.headline(main), *format_metrics(main)], statements.verdict(main)
    lost = tuple(_iter_lost_checkpoints(main))
    tables = [speedup_table(rows, main=main)] if len(rows) > 1 else []
    if not train_only:
        tables += [table for table in (parts_table(rows, main=main), memory_table(rows)) if table is not None]
    tables += [goodput.table] if goodput is not None and not train_only else []
    return Result(
        kind="run",
        name=main.trial.experiment.name,
        title=title,
        hardware=hardware,
        label="WARNING" if main.claim == "invalid" else "RESULT",
        headline=(*answer, *_iter_training_notes(main), *happened),
        verdict="; ".join([short, *(text.rstrip(".") for text in lost)]),
        state=main.state,
        facts=tuple(iter_all_facts(rows, main, goodput=goodput)),
        tables=tuple(tables),
        advice=advice,
        next=next_steps,
        notes=() if train_only else tuple(dict.fromkeys(iter_notes(rows, main, has_advice=bool(advice)))),
    )


def result_of_quick(main: Row, *, hardware: str, command: str, training_s: float) -> Result:
    """Return the result of ``--quick``: what the whole training will take, from a few timed steps."""
    facts = {key: fact for key, fact in facts_of(main, training_s=training_s).items() if fact.value is not None}
    cost, trial, result = facts.get("cost"), main.trial, main.result
    memory = facts.get("peak_memory_mb")
    per = "worker" if trial.device == "cpu" else "GPU"
    fields = {
        "time": f"{duration(training_s)}",
        "hours": figure(facts["estimated_device_hours"].value or 0.0, digits=2),
        "price": f", at a price of {figure(cost.value or 0.0, digits=3)}" if cost else "",
        "steps": counted(result.steps, "step"),
        "timed": str(max(1, result.steps - trial.experiment.benchmark.warmup_steps)),
        "rate": format_rate(main),
        "start": NONE if main.start_s is None else duration(main.start_s),
        "memory": f", peak memory {format_fact(memory)} MiB per {per}" if memory else "",
    }
    launcher = _LAUNCHERS.get(trial.launcher, trial.launcher)
    workers, words = counted(trial.workers, "worker"), [word for word in command.split() if word != "--quick"]
    name = trial.experiment.name
    title = {"name": name, "workers": workers, "strategy": trial.strategy, "launcher": launcher}
    return Result(
        kind="quick",
        name=name,
        title=texts.TITLES["quick"].format(**title, hardware=shorten_hardware(hardware)),
        hardware=hardware,
        headline=tuple(sentence.format(**fields) for sentence in texts.QUICK),
        verdict=texts.QUICK_VERDICT.format(name=main.name, time=fields["time"]),
        facts=tuple(facts.values()),
        next=(("RUN", " ".join(words)),) if words else (),
    )


def iter_all_facts(rows: Sequence[Row], main: Row, *, goodput: Goodput | None = None) -> Iterator[Fact]:
    """Yield what is known of all rows: of the main one first, its speedup, its metrics and its throughput."""
    start_s = main.start_s or 0.0
    own = {key: fact for key, fact in facts_of(main, start_s=start_s).items() if fact.value is not None}
    yield from [own.pop("speedup")] if "speedup" in own else []
    metrics = {
        name: Fact(key=name, value=value, label=name, trial=main.key) for name, value in main.result.metrics.items()
    }
    yield from [metrics.pop(name) for name in iter_metric_names(main)]
    yield from own.values()
    yield from metrics.values()
    yield from goodput.facts if goodput is not None else ()
    for row in rows:
        if row is not main:
            yield from (fact for fact in facts_of(row, start_s=start_s).values() if fact.value is not None)


def iter_metric_names(row: Row) -> Iterator[str]:
    """Yield the metrics of a training in the order of a summary.

    The test set is first, then validation, else the training's loss; in each set the metric of ``checkpoint.best`` is
    first, and the loss is last.
    """
    result = row.result
    best = "" if result.best is None else result.best.metric.removeprefix(_VALIDATION)
    names = [name for name in result.metrics if name.startswith((_TEST, _VALIDATION))]
    names = names or [name for name in result.metrics if name == _LOSS]

    def place(name: str) -> tuple[bool, bool, bool]:
        return not name.startswith(_TEST), name.partition("/")[2] != best, name.endswith("/loss")

    yield from sorted(names, key=place)


def format_metrics(row: Row) -> tuple[str, ...]:
    """Return the final metrics in a line, the test set's first; a metric of many values is left to the page."""
    result, names = row.result, single_names(iter_metric_names(row))
    shown = ", ".join(f"{name} {figure(result.metrics[name])}" for name in names[:_MOST_METRICS])
    when = (
        "last epoch" if result.best is None else f"weights of step {result.best.step:,}, the best {result.best.metric}"
    )
    return (f"{shown} ({when})",) if shown else ()


def shorten_hardware(hardware: str) -> str:
    """Return the cores and GPUs of a description of the hardware, e.g. "2 CPU cores, no GPU"."""
    parts = hardware.split(", ")
    cores = next((part for part in parts if part.endswith((" core", " cores")) and part[0].isdigit()), "")
    if not cores:
        return hardware
    gpus = next((part for part in parts if part == "no GPU" or " x " in part), "")
    return ", ".join(filter(None, [cores.replace(" core", " CPU core"), gpus]))


def format_rate(row: Row) -> str:
    """Return a row's samples per second."""
    return format_fact(facts_of(row)["samples_per_second"])


def _iter_training_notes(main: Row) -> Iterator[str]:
    """Yield what happened during a training that changes its result."""
    result = main.result
    if result.stopped_early:
        yield texts.STOPPED_EARLY.format(steps=f"{result.steps:,}", reason=result.stopped_early)
    if result.unsaved is not None:
        yield from _iter_lost_checkpoints(main)
        failed = counted(result.unsaved.failed, "checkpoint")
        yield texts.UNSAVED.format(failed=failed, reason=result.unsaved.reason)
        if result.best is not None:
            yield texts.BETTER_LOST.format(metric=result.best.metric)


def _iter_lost_checkpoints(main: Row) -> Iterator[str]:
    """Yield the step of the latest checkpoint if the training ended later."""
    if (unsaved := main.result.unsaved) is not None and unsaved.newest != main.result.steps:
        template = texts.NO_CHECKPOINT if unsaved.newest is None else texts.NEWEST
        yield template.format(newest=f"{unsaved.newest or 0:,}", steps=f"{main.result.steps:,}")
