"""The result of ``pipeline benchmark``: rows that were measured, that could not be, and that are predicted."""

from collections.abc import Mapping, Sequence

from pipeline.experiment.schema import Experiment
from pipeline.protocol.trial import Trial
from pipeline.protocol.trial_result import Costs, Link
from pipeline.results import statements, texts
from pipeline.results.advice import advise
from pipeline.results.breakdown import PARTS, parts_table
from pipeline.results.measured import (
    NONE,
    Entry,
    format_rate,
    iter_all_facts,
    iter_decision,
    iter_notes,
    memory_table,
    shorten_hardware,
    speedup_table,
)
from pipeline.results.prediction import Prediction, find_options, fit_link, make_workload, predict
from pipeline.results.record import Advice, Fact, Result
from pipeline.results.speedup import Row, facts_of, find_main, is_wide, name_configuration
from pipeline.wording import counted, figure, join_names

_MANY_REPEATS = 10  # Repeats that a wide interval is to be measured with


def result_of_benchmark(
    entries: Sequence[Row | Entry],
    *,
    declared: Row | None,
    hardware: str,
    command: str,
    cores: int,
    repeats: int,
    is_complete: bool,
    missing: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Result:
    """Return the result of a benchmark; it has no ``run`` and no ``places`` yet."""
    rows = [entry for entry in entries if isinstance(entry, Row)]
    main, name = find_main(rows), rows[0].trial.experiment.name
    next_steps = tuple(iter_decision(main, command=command))
    advice: tuple[Advice, ...] = ()
    if declared is not None and "invalid" not in (main.claim, declared.claim):
        advice = advise(rows, declared, experiment=rows[0].trial.experiment, cores=cores)
    fastest = _find_fastest(rows)
    best = "" if fastest in (None, main) else texts.FASTEST.format(name=fastest.name, rate=format_rate(fastest))
    if main.claim == "none":
        reason = texts.UNMEASURED["baseline missing" if rows[0].role != "baseline" else "nothing else"]
        answer = [texts.WITHOUT_SPEEDUP.format(name=main.name, rate=format_rate(main), reason=reason)]
        reached = f"{format_rate(main)} samples/s"
        verdict = texts.WITHOUT_SPEEDUP_VERDICT.format(name=main.name, reached=reached)
    else:
        answer, verdict = [*statements.headline(main, others=rows)], statements.verdict(main)
    parts = parts_table(rows, main=main)
    if parts is not None:
        predicted = [one for one in entries if isinstance(one, Entry) and "step_ms" in one.cells]
        lines = [(one.name, *(one.cells[key] for key in ("step_ms", *PARTS)), NONE) for one in predicted]
        parts = parts.model_copy(update={"rows": (*parts.rows, *lines)})
    own = [fact.model_copy(update={"trial": "main"}) for fact in facts_of(main).values() if fact.value is not None]
    title = texts.TITLES["benchmark" if is_complete else "benchmark, interrupted"].format(
        name=name,
        configurations=counted(len(rows), "configuration"),
        repeats=counted(repeats, "repeat"),
        hardware=shorten_hardware(hardware).removesuffix(", no GPU"),
    )
    has_remedy = any(text.startswith("pipeline ") for _, text in next_steps)
    ratios = [row.ratio for row in rows if row.ratio is not None]
    is_noisy = any(0 < ratio.size < _MANY_REPEATS and is_wide(ratio) for ratio in ratios)
    noise = [texts.WIDE.format(repeats=_MANY_REPEATS)] if is_noisy and not has_remedy else []
    return Result(
        kind="benchmark",
        name=name,
        title=title,
        hardware=hardware,
        label="WARNING" if main.claim == "invalid" else "RESULT",
        headline=(*answer, *filter(None, [best])),
        verdict=verdict,
        state=main.state,
        facts=(*sorted(own, key=lambda fact: fact.key != "speedup"), *iter_all_facts(rows, main)),
        tables=tuple(filter(None, [speedup_table(entries, main=main, notes=missing), parts, memory_table(rows)])),
        advice=advice,
        next=next_steps,
        notes=tuple(dict.fromkeys([*notes[:2], *noise, *iter_notes(rows, main, has_advice=bool(advice)), *notes[2:]])),
    )


def _find_fastest(rows: Sequence[Row]) -> Row | None:
    """Return the row that is faster than each other one with the baseline's batches beyond the noise, or None."""
    same = [row for row in rows if row.batch == rows[0].batch]
    top = max(same, key=lambda row: row.rate)
    is_clear = len(same) > 1 and all(top.is_faster_than(row) for row in same if row is not top)
    return top if is_clear and top.claim != "invalid" else None


def is_pair(trial: Trial, experiment: Experiment) -> bool:
    """Return True if a trial has several workers of the strategy that is predicted for an experiment."""
    return trial.strategy == "ddp" and trial.workers > 1 and dict(trial.options) == find_options(experiment)


def predict_rows(
    rows: Sequence[Row], costs: Mapping[str, Costs], *, alone: Row, counts: Sequence[int], network: Link | None
) -> tuple[list[Entry], list[str]]:
    """Return a row for each number of workers to predict, and what the prediction is based on."""
    experiment = rows[0].trial.experiment  # that of the file; other rows may have overrides
    together = next((one for one in costs.values() if one.world_size > 1), None)
    workload = make_workload(
        experiment,
        costs[alone.key],
        together=together,
        rest_ms=alone.result.parts.rest_ms or 0.0,
        step_ms=alone.step_ms,
        backend="nccl" if alone.trial.device == "cuda" else "gloo",
    )
    link, origin = network, "as given"
    if link is None:
        assert together is not None
        link = fit_link(together.all_reduces, workers=together.world_size, backend=workload.backend)
        origin = f"measured between {together.world_size} workers"
    found = [predict(workload, link, workers=count) for count in counts]
    limits = {one.limit: join_names([str(each.workers) for each in found if each.limit == one.limit]) for one in found}
    basis = texts.PREDICTED.format(
        gbit=figure(link.bandwidth_gbit, digits=3),
        us=figure(link.latency_us, digits=3),
        origin=origin,
        mb=figure(sum(gradient.bytes for gradient in workload.costs.gradients) / 2**20, digits=3),
        limits=", ".join(f"{limit} ({workers} workers)" for limit, workers in limits.items()),
    )
    checked = []
    for row in rows if network is None else ():
        if is_pair(row.trial, experiment) and row.batch == alone.batch:
            measured, one = row.rate / alone.rate, predict(workload, link, workers=row.trial.workers)
            shown = {"measured": f"{measured:.2f}x", "predicted": f"{one.speedup:.2f}x"}
            error = f"{one.speedup / measured - 1:+.0%}"
            checked.append(texts.CHECKED.format(name=row.short_name, **shown, error=error))
    check = f"Prediction checked with {', '.join(checked)}." if checked else texts.UNCHECKED
    entries = [_make_entry(one, alone=alone, baseline=rows[0], start_s=find_main(rows).start_s or 0.0) for one in found]
    return entries, [basis, check]


def _make_entry(found: Prediction, *, alone: Row, baseline: Row, start_s: float) -> Entry:
    """Return the row of a prediction: the facts of one worker with other values."""
    rate, count = found.speedup * alone.rate, found.workers * alone.device_count
    speedup = rate / baseline.rate
    seconds = alone.result.whole_training / rate + start_s if alone.result.whole_training else None
    price = alone.trial.experiment.benchmark.price_per_device_hour
    values = {
        "samples_per_second": rate,
        "speedup": speedup,
        "efficiency": speedup * baseline.device_count / count,
        "estimated_training_s": seconds,
        "cost": None if seconds is None or price is None else price * count * seconds / 3600,
        **found.times,
    }
    name = name_configuration(counted(found.workers, "worker"), "ddp", "predicted")
    key, known = f"predicted-{found.workers}", facts_of(alone)
    plain = {"low": None, "high": None, "state": "ok", "trial": key}
    cells: dict[str, Fact | str] = {
        one: known[one].model_copy(update={"value": value, **plain}) for one, value in values.items()
    }
    return Entry(key, name, {"devices": str(count), **cells})
