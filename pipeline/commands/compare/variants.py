"""Variants among recorded trainings: runs that differ in their seed only, and the pairs of two variants."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from pipeline.errors import UsageError
from pipeline.experiment.reported import PREFIX
from pipeline.experiment.schema import Experiment
from pipeline.experiment.summary import flatten
from pipeline.experiment.values import Direction
from pipeline.protocol.events import Finished, RunOpened, Started
from pipeline.record import journal, loss_file
from pipeline.record.runs import RunSummary, last_opened
from pipeline.report.numbers.courses import direction
from pipeline.wording import did_you_mean

_ASIDE = (
    *("name", "seed", "tracking.", "benchmark.", "sweep."),
    *("checkpoint.directory", "checkpoint.every_", "checkpoint.keep", "train.log_every_steps"),
    *(f"loader.{name}" for name in ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")),
    *(f"parallel.{name}" for name in ("address", "cluster", "cpus_per_worker", "grace_s", "timeout_s")),
)
"""Keys that decide nothing of what a training learns, and the seed, by which trainings are paired."""
_GIVEN = ("name", "train.epochs", "train.global_batch_size")
_TEST = "test/"


class SeededRun(NamedTuple):
    """A recorded training."""

    run: RunSummary
    opened: RunOpened
    metrics: Mapping[str, float]
    """Values at its end, or at its best step; empty if it did not complete."""
    data: str
    """Digest of its data; empty if it never started."""

    @property
    def seed(self) -> int:
        """Its seed; 0 unless the file has one.

        Raises:
            UsageError: the run's journal has no number there.
        """
        text = self.opened.params.get("seed", "0")
        if not (text.isascii() and text.isdecimal()):
            raise UsageError(f"{self.run.run} cannot be compared: its seed is {text!r}, not a number")
        return int(text)

    @property
    def settings(self) -> dict[str, str]:
        """Settings that decide what it learns, without the seed."""
        params, defaults = self.opened.params, _defaults()
        return {
            key: value for key, value in params.items() if not key.startswith(_ASIDE) and defaults.get(key) != value
        }


class Variant(NamedTuple):
    """Trainings that differ in their seed only."""

    name: str
    """A for the first one, and so on."""
    runs: Mapping[int, SeededRun]
    """By seed."""

    @property
    def first(self) -> SeededRun:
        """Run whose settings stand for all."""
        return next(iter(self.runs.values()))


def read_training(run: RunSummary) -> SeededRun:
    """Read a recorded training.

    Raises:
        UsageError: it is not a training.
    """
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

    Raises:
        UsageError: all are of one variant.
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
    variants = []
    for number, group in enumerate(found):
        runs: dict[int, SeededRun] = {}
        for one in sorted(
            group, key=lambda one: (bool(one.metrics), one.run.began)
        ):  # complete runs last, so that they are kept
            if (other := runs.get(one.seed)) is not None:
                why = "is newer" if bool(other.metrics) == bool(one.metrics) else "completed"
                notes.append(f"{other.run.run} is left out: {one.run.run} has the same seed and {why}")
            runs[one.seed] = one
        variants.append(Variant(name_variant(number), dict(sorted(runs.items()))))
    return variants, notes


def name_variant(number: int) -> str:
    """Name a variant by its number from 0: A, B, and so on."""
    return chr(ord("A") + number) if number < 26 else f"A{number}"


def choose_metric(trainings: Sequence[SeededRun], asked: str | None) -> str:
    """Return the metric to compare by: the one asked for, or that of ``checkpoint.best``; on a test set if all have it.

    Raises:
        UsageError: the trainings that completed have no such metric, or none at all.
    """
    complete = [one for one in trainings if one.metrics]
    first = (complete or trainings)[0]
    shared = set(first.metrics).intersection(*(one.metrics for one in complete))
    known = [name for name in first.metrics if name.startswith((PREFIX, _TEST)) and name in shared]
    if asked is not None:
        for name in (asked, f"{_TEST}{asked}", f"{PREFIX}{asked}"):
            if name in known:
                return name
        hint = did_you_mean(asked, known) or f"; the runs have {', '.join(known) or 'none'} in common"
        raise UsageError(f"--metric {asked}: there is no such metric{hint}")
    chosen = first.run.metric
    tested = chosen.replace(PREFIX, _TEST, 1)
    if tested in known or chosen in known:
        return tested if tested in known else chosen
    if any(name.startswith((PREFIX, _TEST)) for name in first.metrics):
        raise UsageError("the runs have no validation metric in common, or not the one of checkpoint.best")
    raise UsageError(f"{first.run.run} has no validation metric to compare by: {_state(first)}")


def _state(one: SeededRun) -> str:
    return "it has no validation set" if one.metrics else "it did not complete"


def direction_of(metric: str, one: SeededRun, *, mode: Direction | None) -> Direction:
    """Return the direction in which a metric improves, ``mode`` if it is given.

    Raises:
        UsageError: it is unknown.
    """
    found = mode or direction(metric.replace(_TEST, PREFIX, 1), one.opened)
    if found is None:
        raise UsageError(f"it is unknown whether {metric} is better if it is higher or lower. Set --mode min or max.")
    return found


class Pairs(NamedTuple):
    """Pairs of two variants."""

    values: dict[int, tuple[float, float]]
    """Values of a metric, by seed."""
    are_identical: bool
    """True if all losses of each pair are equal to the bit."""
    notes: tuple[str, ...]
    """Notes on pairs that do not count, and on different data."""


def pair(first: Variant, second: Variant, *, metric: str) -> Pairs:
    """Pair the runs of two variants by their seed. Runs with different seeds are not paired."""
    values: dict[int, tuple[float, float]] = {}
    notes = list(_lonely(first, second)) + list(_lonely(second, first))
    are_identical = True
    for seed in first.runs.keys() & second.runs.keys():
        both = first.runs[seed], second.runs[seed]
        if reason := next(filter(None, (_lacks(one, metric) for one in both)), ""):
            notes.append(f"seed {seed} does not count: {reason}")
            continue
        values[seed] = (both[0].metrics[metric], both[1].metrics[metric])
        losses = [loss_file.read(one.run.folder) for one in both]
        are_identical &= bool(losses[0]) and losses[0] == losses[1] and values[seed][0] == values[seed][1]
        if both[0].data != both[1].data and not any("different data" in note for note in notes):
            notes.append(f"{first.name} and {second.name} train on different data, e.g. with seed {seed}")
    return Pairs(dict(sorted(values.items())), are_identical and bool(values), tuple(notes))


def _lonely(one: Variant, other: Variant) -> Iterator[str]:
    for seed in one.runs.keys() - other.runs.keys():
        yield f"seed {seed} of {one.name} has no partner in {other.name}"


@cache
def _defaults() -> Mapping[str, str]:
    """Return the parameters of keys that a file does not give."""
    least = {"name": "x", "model": {"_target_": "x.x"}, "data": {"_target_": "x.x"}, "loss": {"_target_": "x.x"}}
    least |= {"optimizer": {"_target_": "x.x"}, "train": {"epochs": 1, "global_batch_size": 1}}
    given = flatten(Experiment.model_validate(least))
    return {key: value for key, value in given.items() if "_target_" not in key and key not in _GIVEN}


def _lacks(one: SeededRun, metric: str) -> str:
    """Return why a training has no value of a metric that counts; empty if it has one."""
    if one.run.is_quick:
        return f"{one.run.run} is a quick test"
    if not one.metrics:
        return f"{one.run.run} did not complete"
    if metric not in one.metrics:
        return f"{one.run.run} has no {metric}"
    return f"{metric} of {one.run.run} is {one.metrics[metric]}" if not math.isfinite(one.metrics[metric]) else ""
