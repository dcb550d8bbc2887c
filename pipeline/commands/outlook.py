"""Time, device hours and price of a training before it starts, estimated from an earlier run of the same file."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pipeline.config.load import ExperimentFile
from pipeline.config.schema import Experiment
from pipeline.config.summary import flatten
from pipeline.errors import UsageError
from pipeline.planning.plan import Plan
from pipeline.protocol.events import Started
from pipeline.protocol.trial import Training, Trial
from pipeline.recording.journal import journal, provenance
from pipeline.recording.journal.folder import read_status, runs_named
from pipeline.recording.journal.run_summary import summarized
from pipeline.wording import approximate, counted, duration, figure

_ON_SPEED = (
    "model", "data", "task", "loss", "loader", "sampler", "train.global_batch_size", "train.batch_size_per_worker",
    "train.precision", "train.compile", "train.gradient_accumulation", "train.activation_checkpointing",
    "train.memory_format", "parallel.options",
)  # fmt: skip
"""Beginnings of the keys that decide how fast a training is and how many samples it has."""


class _Earlier(NamedTuple):
    """A completed run that is as fast as the planned one."""

    name: str
    samples_per_second: float
    started: Started


def with_outlook(plan: Plan, file: ExperimentFile, *, at_least_s: float = 0.0) -> Plan:
    """Return the plan with a note on the whole training, if an earlier run allows an estimate.

    Args:
        plan: the plan.
        file: its experiment.
        at_least_s: seconds of the shortest training that gets a note.
    """
    main = plan.main
    earlier = None
    if isinstance(main, Training) and not main.is_quick:
        with suppress(UsageError, OSError):  # the journal of an earlier run is damaged
            earlier = _find_earlier(plan, file)
    if earlier is None or (seconds := _estimate_s(earlier, plan.experiment)) < at_least_s:
        return plan
    note = _describe(main, earlier, plan.experiment, seconds=seconds)
    return plan.model_copy(update={"notes": (*plan.notes, note)})


def _find_earlier(plan: Plan, file: ExperimentFile) -> _Earlier | None:
    """Return the newest completed run of the file with the same model, data, devices and batch."""
    wanted = {**_find_placement(provenance.trial_tags(plan.main)), "hardware": provenance.hardware(plan)}
    settings = _settings(flatten(plan.experiment))
    for folder, opened in runs_named(Path(plan.experiment.tracking.directory), name=plan.experiment.name):
        if opened.file != file.source or opened.tags.get("quick") or read_status(folder) != "FINISHED":
            continue
        placed = {**_find_placement(opened.tags), "hardware": opened.tags.get("hardware")}
        if placed != wanted or _settings(opened.params) != settings:
            continue
        events = journal.marked(folder / journal.FILE_NAME, "started")
        started = [event for event in events if isinstance(event, Started) and event.trial == "main"]
        run = summarized(folder)
        if started and run and run.samples_per_second:
            return _Earlier(folder.name, run.samples_per_second, started[-1])
    return None


def _find_placement(tags: Mapping[str, str]) -> dict[str, str | None]:
    return {name: tags.get(name) for name in ("strategy", "world_size", "device", "cpus_per_worker")}


def _settings(params: Mapping[str, str]) -> dict[str, str]:
    return {key: text for key, text in params.items() if key.startswith(_ON_SPEED)}


def _count_samples(earlier: _Earlier, experiment: Experiment) -> int:
    train, started = experiment.train, earlier.started
    if train.steps is not None:
        return train.steps * train.global_batch_size
    return (train.epochs or 0) * (started.epoch_samples or started.train_samples)


def _estimate_s(earlier: _Earlier, experiment: Experiment) -> float:
    seconds = _count_samples(earlier, experiment) / earlier.samples_per_second
    return seconds if experiment.train.minutes is None else min(seconds, 60 * experiment.train.minutes)


def _describe(main: Trial, earlier: _Earlier, experiment: Experiment, *, seconds: float) -> str:
    is_cpu = main.device == "cpu"
    devices = main.workers * (main.cpus_per_worker if is_cpu else max(1, main.devices_per_worker))
    hours = devices * seconds / 3600
    price = experiment.benchmark.price_per_device_hour
    cost = f", price {figure(price * hours, digits=2)}" if price is not None else ""
    unit = "core" if is_cpu else "GPU"
    return (
        f"the training takes about {duration(seconds) if seconds >= 3600 else approximate(seconds)} "
        f"({figure(hours, digits=2)} {unit} hours on {counted(devices, unit)}{cost}). Estimated from {earlier.name}: "
        f"{_count_samples(earlier, experiment):,} samples at {figure(earlier.samples_per_second)} samples/s, without "
        "start, evaluations, checkpoints and measurements"
    )
