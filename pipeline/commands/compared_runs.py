"""Recorded trainings as ``compare`` sees them: variants, which differ in more than the seed, pairs, and the answer."""

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from pipeline.errors import UsageError
from pipeline.experiment.load import flatten
from pipeline.experiment.reported import PREFIX
from pipeline.experiment.schema import Experiment
from pipeline.experiment.values import Direction, Frozen
from pipeline.protocol.estimates import CONFIDENCE
from pipeline.protocol.events import Finished, RunOpened, Started
from pipeline.record import journal, loss_file, provenance
from pipeline.record.runs import RunSummary, data_of, environment_of, last_opened
from pipeline.results import record, texts
from pipeline.results.paired import (
    Answer,
    Split,
    Way,
    answer,
    find_apart,
    find_target,
    have_spread,
    is_rate,
    judge_together,
    read_way,
    split,
)
from pipeline.results.record import Fact, Result, Table, format_fact
from pipeline.wording import counted, did_you_mean, figure, listed

OF_RECORD = ("seed", "tracking.", "benchmark.", "sweep")
"""Keys that decide neither what a training learns nor how fast, and the seed, by which trainings are paired."""
_ASIDE = (
    *(*OF_RECORD, "name"),
    *("checkpoint.directory", "checkpoint.every_", "checkpoint.keep", "train.log_every_steps"),
    *(f"loader.{name}" for name in ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")),
    *(f"parallel.{name}" for name in ("address", "cluster", "cpus_per_worker", "grace_s", "timeout_s")),
)
"""Keys that decide nothing of what a training learns, too."""
_GIVEN = ("name", "train.epochs", "train.global_batch_size")
_TEST = "test/"
_MOST_SENTENCES = 3


class Question(Frozen):
    """Metric, margin and target by which variants are compared."""

    metric: str | None = None  # Name of the metric; None for ``checkpoint.best``, or else a validation metric
    mode: Direction | None = None  # Direction in which it improves; None if it is known
    margin: float | None = None  # Difference up to which variants count as equal, in points for a rate
    is_timed: bool = False  # True to compare how soon they reach a target
    target: float | None = None  # The target; None for a value that all trainings reach


class SeededRun(NamedTuple):
    """A recorded training."""

    run: RunSummary
    opened: RunOpened
    metrics: Mapping[str, float]  # Values at its end, or at its best step; empty if it did not complete
    data: str  # Digest of its data; empty if it never started

    @property
    def seed(self) -> int:
        """Its seed; 0 unless the file has one."""
        text = self.opened.params.get("seed", "0")
        if not (text.isascii() and text.isdecimal()):
            raise UsageError(f"{self.run.run} cannot be compared: its seed is {text!r}, not a number")
        return int(text)

    @property
    def settings(self) -> dict[str, str]:
        """Settings that decide what it learns, without the seed."""
        known = _defaults()
        params = self.opened.params.items()
        return {key: value for key, value in params if not key.startswith(_ASIDE) and known.get(key) != value}

    def read_way(self, metric: str) -> Way:
        """Read what it took to reach the values of a validation metric."""
        tags, params = self.opened.tags, self.opened.params
        devices = int(tags.get("world_size", "1"))
        if tags.get("device") != "cuda":
            devices *= int(tags.get("cpus_per_worker", "1"))
        elif tags.get("strategy") == "dp":  # by default, it uses all GPUs of "8 x NVIDIA H100"
            asked, there = params.get("parallel.gpus_per_worker", ""), re.search(r"(\d+) x ", tags.get("hardware", ""))
            devices = int(asked) if asked.isdecimal() else int(there[1]) if there else 1
        batch = int(params.get("train.global_batch_size", "1"))
        return read_way(journal.read(self.run.folder / journal.FILE_NAME), metric, batch=batch, devices=devices)


class Variant(NamedTuple):
    """Trainings that differ in their seed only."""

    name: str  # A for the first one, and so on
    description: str  # File or settings; the run if it is a single recorded one
    runs: Mapping[int, SeededRun]  # By seed

    @property
    def first(self) -> SeededRun:
        """Run whose settings stand for all."""
        return next(iter(self.runs.values()))


@cache
def _defaults() -> Mapping[str, str]:
    """Return the parameters of keys that a file does not give."""
    least = {"name": "x", "model": {"_target_": "x.x"}, "data": {"_target_": "x.x"}, "loss": {"_target_": "x.x"}}
    least |= {"optimizer": {"_target_": "x.x"}, "train": {"epochs": 1, "global_batch_size": 1}}
    given = flatten(Experiment.model_validate(least))
    return {key: value for key, value in given.items() if "_target_" not in key and key not in _GIVEN}


def read_training(run: RunSummary) -> SeededRun:
    """Read a recorded training."""
    if run.command != "run":
        raise UsageError(f"{run.run} is a {run.command}, not a training, so it can't be compared with others")
    events = list(journal.marked(run.folder / journal.FILE_NAME, "started", "finished"))
    ends = [event for event in events if isinstance(event, Finished) and event.trial == "main"]
    digests = [event.data_digest for event in events if isinstance(event, Started) and event.trial == "main"]
    is_whole = bool(ends) and run.status == "FINISHED" and not run.is_quick
    return SeededRun(run, last_opened(run.folder), ends[-1].result.metrics if is_whole else {}, (digests or [""])[-1])


def divide(trainings: Sequence[SeededRun]) -> tuple[list[Variant], list[str]]:
    """Divide trainings into variants, in the order in which they are named; return notes on those left out, too.

    Two trainings are two variants in any case: their code or machine may differ.
    """
    groups: dict[frozenset[tuple[str, str]], list[SeededRun]] = {}
    for one in trainings:
        groups.setdefault(frozenset(one.settings.items()), []).append(one)
    found = list(groups.values())
    if len(found) == 1:
        if len(trainings) != 2:
            message = f"all {len(trainings)} runs have the same settings but for the seed"
            raise UsageError(f"{message}. Name runs of another experiment as well, or exactly two runs.")
        found = [[one] for one in trainings]
    notes: list[str] = []
    settings = [group[0].settings for group in found]
    keys = dict.fromkeys(key for one in settings for key in one)
    differing = [key for key in keys if len({one.get(key) for one in settings}) > 1]
    variants = []
    for number, group in enumerate(found):
        runs: dict[int, SeededRun] = {}
        for one in sorted(group, key=lambda one: (bool(one.metrics), one.run.began)):  # complete ones last: they stay
            if (other := runs.get(one.seed)) is not None:
                why = "is newer" if bool(other.metrics) == bool(one.metrics) else "completed"
                notes.append(f"{other.run.run} is left out: {one.run.run} has the same seed and {why}")
            runs[one.seed] = one
        runs = dict(sorted(runs.items()))
        own = [f"{key}={group[0].settings.get(key, 'default')}" for key in differing]
        described = group[0].run.run if len(runs) == 1 or not own else listed(own, most=_MOST_SENTENCES)
        variants.append(Variant(name_variant(number), described, runs))
    return variants, notes


def name_variant(number: int) -> str:
    """Name a variant by its number from 0: A, B, and so on."""
    return chr(ord("A") + number) if number < 26 else f"A{number}"


def choose_metric(
    trainings: Sequence[SeededRun], asked: str | None, mode: Direction | None = None
) -> tuple[str, Direction]:
    """Return the metric to compare by, and the direction in which it improves.

    It is the one asked for, or that of ``checkpoint.best``; on a test set if all have it.
    """
    complete = [one for one in trainings if one.metrics]
    first = (complete or trainings)[0]
    shared = set(first.metrics).intersection(*(one.metrics for one in complete))
    known = [name for name in first.metrics if name.startswith((PREFIX, _TEST)) and name in shared]
    if asked is not None:
        metric = next((name for name in (asked, f"{_TEST}{asked}", f"{PREFIX}{asked}") if name in known), None)
        if metric is None:
            hint = did_you_mean(asked, known) or f"; the runs have {', '.join(known) or 'none'} in common"
            raise UsageError(f"--metric {asked}: there is no such metric{hint}")
    else:
        tested = first.run.metric.replace(PREFIX, _TEST, 1)
        metric = next((name for name in (tested, first.run.metric) if name in known), None)
        if metric is None and any(name.startswith((PREFIX, _TEST)) for name in first.metrics):
            raise UsageError("the runs have no validation metric in common, or not the one of checkpoint.best")
        if metric is None:
            why = "it has no validation set" if first.metrics else "it did not complete"
            raise UsageError(f"{first.run.run} has no validation metric to compare by: {why}")
    if (direction := mode or first.opened.directions.get(metric.replace(_TEST, PREFIX, 1))) is None:
        raise UsageError(f"it is unknown whether {metric} is better if it is higher or lower. Set --mode min or max.")
    return metric, direction


class Pairs(NamedTuple):
    """Pairs of two variants."""

    values: Mapping[int, tuple[float, float]]  # Values of a metric, by seed
    apart: float | None  # Largest share by which a loss or a value differs within a pair; None if losses are not known
    notes: tuple[str, ...]  # Notes on pairs that do not count, and on different data


def pair(first: Variant, second: Variant, *, metric: str) -> Pairs:
    """Pair the runs of two variants by their seed. Runs with different seeds are not paired."""
    values: dict[int, tuple[float, float]] = {}
    notes = [*_iter_lonely(first, second), *_iter_lonely(second, first)]
    shares: list[float | None] = []
    for seed in sorted(first.runs.keys() & second.runs.keys()):
        a, b = first.runs[seed], second.runs[seed]
        if reason := next(filter(None, (_lacks(one, metric) for one in (a, b))), ""):
            notes.append(f"seed {seed} does not count: {reason}")
            continue
        values[seed] = (a.metrics[metric], b.metrics[metric])
        shares.append(find_apart(loss_file.read(a.run.folder), loss_file.read(b.run.folder)))
        shares.append(find_apart(values[seed][:1], values[seed][1:]))
        if a.data != b.data and not any("different data" in note for note in notes):
            notes.append(f"{first.name} and {second.name} train on different data, e.g. with seed {seed}")
    known = [share for share in shares if share is not None]
    return Pairs(values, max(known) if shares and len(known) == len(shares) else None, tuple(notes))


def _iter_lonely(one: Variant, other: Variant) -> Iterator[str]:
    for seed in one.runs.keys() - other.runs.keys():
        yield f"seed {seed} of {one.name} has no partner in {other.name}"


def _lacks(one: SeededRun, metric: str) -> str:
    """Return why a training has no value of a metric that counts; empty if it has one."""
    if one.run.is_quick:
        return f"{one.run.run} is a quick test"
    if not one.metrics:
        return f"{one.run.run} did not complete"
    if metric not in one.metrics:
        return f"{one.run.run} has no {metric}"
    return f"{metric} of {one.run.run} is {one.metrics[metric]}" if not math.isfinite(one.metrics[metric]) else ""


def compare_runs(runs: Sequence[RunSummary], question: Question = Question()) -> Result:  # noqa: B008 - frozen
    """Pair recorded runs, in the order in which they were named: each variant with the first; and list what differs.

    Runs that are not all trainings are two, and have no answer.
    """
    other = next((one for one in runs if one.command != "run"), None)
    if other is not None and question.metric is not None:
        raise UsageError("--metric compares trainings, and not all of these runs are trainings")
    if other is not None and len(runs) != 2:
        raise UsageError(
            f"{other.run} is a {other.command}. More than two runs can only be compared if all are trainings."
        )
    if other is not None:
        firsts, both = list(runs), (f"A  {runs[0].run}", f"B  {runs[1].run}")
        result = Result(kind="compare", name="", title="", headline=both, verdict=texts.NO_ANSWER, answer="none")
    else:
        variants, notes = divide([read_training(one) for one in runs])
        firsts = [one.first.run for one in variants]
        result = make_result(variants, question, notes=notes)
    tables, same = list(result.tables), list[str]()
    for number, second in enumerate(firsts[1:], start=1):
        rows = {title: [*found] for title, found in _iter_differences(firsts[0], second)}
        if len(runs) > 2:
            del rows["results"]
        named = name_variant(number)
        same += [title for title, found in rows.items() if not found] if len(firsts) == 2 else []
        found = [row for each in rows.values() for row in each]
        table = Table(title=f"What differs between A and {named}", header=("", "A", named), rows=tuple(found))
        if found:
            tables.insert(0 if len(runs) == 2 else len(tables), table)
    told = (*result.notes, *([f"No differences: {', '.join(same)}"] if same else []))
    title = f"{firsts[0].experiment}: {counted(len(runs), 'recorded run')} compared"
    return result.model_copy(
        update={"tables": tuple(tables), "notes": told, "name": firsts[0].experiment, "title": title}
    )


def _iter_differences(a: RunSummary, b: RunSummary) -> Iterator[tuple[str, Iterator[tuple[str | Fact, ...]]]]:
    """Yield the rows of what differs between two runs: results, configuration and environment."""
    yield "results", _iter_apart(_list_results(a), _list_results(b))
    yield "configuration", _iter_apart(*(last_opened(one.folder).params for one in (a, b)))
    yield "environment", _iter_apart(*({**environment_of(one.folder), **data_of(one.folder)} for one in (a, b)))


def _list_results(run: RunSummary) -> dict[str, str | Fact]:
    """Return how a run ended and its numbers: those of its result, or of its journal if it has none."""
    found: dict[str, str | Fact] = {"command": run.command, "status": run.status}
    found |= {"message": run.message} if run.message else {}
    found |= {name: Fact(key=name, value=value, trial=run.run) for name, value in run.metrics.items()}
    try:
        result = record.read(run.folder)
    except UsageError:
        return found | {"result": f"{record.FILE_NAME} is damaged"}
    for fact in result.all_facts if result is not None else ():
        name = fact.label or fact.key
        found[name if fact.trial == "main" else f"{fact.trial}: {name}"] = fact
    return found


def _iter_apart(
    a: Mapping[str, str | Fact] | Mapping[str, str], b: Mapping[str, str | Fact] | Mapping[str, str]
) -> Iterator[tuple[str | Fact, ...]]:
    for name in dict.fromkeys((*a, *b)):
        both = [values.get(name, "-") for values in (a, b)]
        values = [one.value if isinstance(one, Fact) else one for one in both]
        if values[0] != values[1]:
            yield (name, *both)


def make_result(
    variants: Sequence[Variant], question: Question, *, notes: Sequence[str] = (), can_train: bool = False
) -> Result:
    """Compare each of several variants, which have at least one run each, with the first."""
    first, *rest = variants
    trained = [one for variant in variants for one in variant.runs.values()]
    told = list(notes)
    names = [f"{one.name}  {one.description}" for one in variants]
    try:
        metric, direction = choose_metric(trained, question.metric, question.mode)
    except UsageError as error:
        if question.metric is not None:
            raise
        return Result(
            kind="compare", name="", title="", headline=(texts.NO_ANSWER, *names), verdict=texts.NO_ANSWER,
            answer="none", notes=(*told, str(error)),
        )  # fmt: skip
    paired = [pair(first, other, metric=metric) for other in rest]
    told += dict.fromkeys(note for pairs in paired for note in pairs.notes)
    answers = _answer(paired, metric=metric, direction=direction, margin=question.margin)
    known = [one for one in answers if one is not None]
    told += _explain(known, variants)
    said = [one.format(first.name, other.name) for one, other in zip(answers, rest, strict=True) if one is not None]
    splits = _split(variants, metric.replace(_TEST, PREFIX, 1), direction, question) if question.is_timed else []
    timed = [line for one, other in zip(splits, rest, strict=False) for line in one.format(first.name, other.name)]
    verdict = "; ".join(timed + said) or texts.NO_ANSWER
    shown = [*timed, *said]
    if len(known) > _MOST_SENTENCES:
        shown = [*timed, _count_answers(known, rest, first.name)]
    facts = [Fact(key="pairs", value=len(known[0].seeds))] if known else []
    for number, (one, other) in enumerate(zip(answers, rest, strict=True)):
        end = "" if number == 0 else f"_{other.name}"
        facts += [one.fact(f"difference{end}", f"{other.name} - {first.name}, {metric}")] if one is not None else []
        facts += splits[number].facts(end) if splits else []
    more = max((one.more_pairs or 0 for one in known), default=0)
    facts += [Fact(key="more_pairs", value=more, label="pairs that would decide in addition")] if more else []
    own = [_make_seeds_table(variants, paired, answers, metric)] if known else []
    if len(rest) > 1 and known:
        own.insert(0, _make_variants_table(variants, answers, metric))
    return Result(
        kind="compare",
        name=first.first.run.experiment,
        title="",
        headline=(*(shown or [texts.NO_ANSWER]), *(names if len(variants) <= _MOST_SENTENCES else ())),
        verdict=verdict,
        answer=known[0].verdict if answers[0] is not None else "none",
        state="inconclusive" if not known or known[0].verdict == "inconclusive" else "ok",
        facts=tuple(facts),
        tables=tuple(own),
        next=(("NEXT", _name_next(len(first.runs) + more)),) if can_train and more else (),
        notes=(*([texts.CLAIM] if known else []), *([texts.TIMED] if timed else []), *told),
    )


def _answer(paired: Sequence[Pairs], *, metric: str, direction: Direction, margin: float | None) -> list[Answer | None]:
    """Answer for each variant that has pairs, in one unit, so that the answers hold together."""
    values = [value for pairs in paired for both in pairs.values.values() for value in both]
    rated = is_rate(metric, values, direction=direction)
    make = partial(answer, metric=metric, direction=direction, is_rate=rated, margin=margin)
    found = [make(pairs.values, apart=pairs.apart) for pairs in paired if pairs.values]
    judged = iter(judge_together(found) if len(found) > 1 else found)
    return [next(judged) if pairs.values else None for pairs in paired]


def _explain(answers: Sequence[Answer], variants: Sequence[Variant]) -> Iterator[str]:
    """Yield notes on what the answers do not show."""
    first, *others = variants
    if len(answers) > 1:
        yield texts.SEVERAL.format(count=len(answers), a=first.name)
    unclear = [one for one in answers if one.verdict == "inconclusive" and len(one.seeds) > 1]
    if any(not have_spread(one.differences) for one in unclear):
        yield texts.SAME_DIFFERENCE
    if any(not first.runs.keys() & other.runs.keys() for other in others):
        yield texts.NO_PARTNER
    if any(one.is_skewed for one in answers):
        yield texts.SKEWED


def _split(variants: Sequence[Variant], metric: str, direction: Direction, question: Question) -> list[Split]:
    """Compare how soon the variants reach the target. The intervals of several hold together (Bonferroni)."""
    first, *rest = variants
    ways = {one.name: {seed: run.read_way(metric) for seed, run in one.runs.items() if run.metrics} for one in variants}
    target = question.target
    if target is None:
        target = find_target((way for found in ways.values() for way in found.values()), direction)
    if target is None:
        return []
    level = 1 - (1 - CONFIDENCE) / len(rest)
    found = []
    for other in rest:
        both = ways[first.name], ways[other.name]
        costs = {
            seed: (both[0][seed].find_cost(target, direction), both[1][seed].find_cost(target, direction))
            for seed in sorted(both[0].keys() & both[1].keys())
        }
        found.append(split(costs, metric=metric, target=target, confidence=level))
    return found


def _count_answers(answers: Sequence[Answer], others: Sequence[Variant], first: str) -> str:
    """Return how many variants have each answer, with their names."""
    by_verdict: dict[str, list[str]] = {}
    for one, other in zip(answers, others, strict=True):
        by_verdict.setdefault(one.verdict, []).append(other.name)
    order = ("better", "worse", "equal", "identical", "inconclusive")
    parts = [f"{verdict}: {listed(by_verdict[verdict])}" for verdict in order if verdict in by_verdict]
    return f"Compared with {first}, {answers[0].metric}: {'; '.join(parts)}"


def _make_variants_table(variants: Sequence[Variant], answers: Sequence[Answer | None], metric: str) -> Table:
    """Return a row for each variant: its mean value, and how it compares with the first."""
    first, *rest = variants
    rows: list[tuple[str | Fact, ...]] = [(f"{first.name} {first.description}", _mean(first, metric), "-", "-")]
    for one, found in zip(rest, answers, strict=True):
        cells = ("-", "none") if found is None else (format_fact(found.fact()), found.verdict)
        rows.append((f"{one.name} {one.description}", _mean(one, metric), *cells))
    return Table(title=metric, header=("variant", "mean", f"less {first.name}", "answer"), rows=tuple(rows))


def _make_seeds_table(
    variants: Sequence[Variant], paired: Sequence[Pairs], answers: Sequence[Answer | None], metric: str
) -> Table:
    """Return a row for each seed: the values of all variants, and their differences from the first."""
    first, *rest = variants
    rows: list[tuple[str | Fact, ...]] = []
    for seed in sorted({seed for pairs in paired for seed in pairs.values}):
        cells: list[str | Fact] = [str(seed), _value(first, seed, metric)]
        for one, found in zip(rest, answers, strict=True):
            cells.append(_value(one, seed, metric))
            known = found is not None and seed in found.seeds
            cells.append(f"{found.differences[found.seeds.index(seed)]:+.3g}" if found is not None and known else "-")
        rows.append(tuple(cells))
    header = ["seed", first.name]
    mean: list[str | Fact] = ["mean", _mean(first, metric)]
    for one, found in zip(rest, answers, strict=True):
        header += [one.name, f"{one.name} - {first.name}"]
        mean += [_mean(one, metric), format_fact(found.fact(), with_interval=False) if found is not None else "-"]
    return Table(title=metric, header=tuple(header), rows=(*rows, tuple(mean)))


def _value(variant: Variant, seed: int, metric: str) -> str | Fact:
    run = variant.runs.get(seed)
    if run is None or metric not in run.metrics:
        return "-"
    return Fact(key=metric, value=run.metrics[metric], trial=run.run.run)


def _mean(variant: Variant, metric: str) -> str:
    values = [run.metrics[metric] for run in variant.runs.values() if metric in run.metrics]
    return figure(fmean(values)) if values else "-"


def _name_next(pairs: int) -> str:
    """Return the command that adds pairs."""
    words = ["", *shlex.split(provenance.command())]
    kept = [word for before, word in pairwise(words) if "--seeds" not in (before, word.partition("=")[0])]
    return shlex.join([*kept, "--seeds", str(pairs)]) if kept else f"Add pairs with --seeds {pairs}"
