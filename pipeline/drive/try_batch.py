"""Try of an experiment on a few samples, in this process, before anything else is started: ``pipeline check``."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

from pipeline.drive import initial_weights
from pipeline.drive.execute import explained
from pipeline.errors import ExperimentError, ResourceError
from pipeline.experiment import components
from pipeline.experiment.load import ExperimentFile
from pipeline.experiment.schema import Experiment
from pipeline.launch.base import Session
from pipeline.plan import resources
from pipeline.plan.plan import make_plan
from pipeline.plan.resources import Resources
from pipeline.protocol.events import AnyEvent
from pipeline.protocol.trial import BatchCheck, Trial
from pipeline.protocol.trial_outcome import Outcome
from pipeline.system.imports import undisturbed
from pipeline.system.memory_limits import find_memory_limits

_log = logging.getLogger(__name__)
_SAMPLES = 2
_STATES = 2
"""Values that an optimizer keeps for each parameter, as Adam does; others keep fewer."""
_MOST_OF_MEMORY = 0.5
_MANY = 2**16


def find_reason_to_skip(experiment: Experiment, *, allowed: tuple[str, ...]) -> str:
    """Return why an experiment can't be tried in a process of this machine, in a sentence; empty if it can."""
    parallel = experiment.parallel
    if parallel.launcher == "ray" and parallel.cluster:
        return f"The experiment runs on the Ray cluster at {parallel.cluster}."
    needed, free = _needed_bytes(experiment, allowed=allowed), _free_bytes(experiment)
    if needed > _MOST_OF_MEMORY * free:
        sizes = f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
        return f"Weights, gradients and optimizer state take {sizes}."
    return ""


def try_batch(file: ExperimentFile, *, allowed: tuple[str, ...], receive: Callable[[AnyEvent], None]) -> None:
    """Take the first steps of a training and evaluate, on a few samples, without a folder and without a run.

    An error in a step on two samples counts if samples of a worker's whole batch raise one: code may need its size.

    Args:
        file: the experiment.
        allowed: packages that it may name.
        receive: gets the progress.

    Raises:
        PipelineError: what the training would raise, with its place in the file.
    """
    with explained(file):
        planned = _plan(file.experiment, resources.detect(), allowed=allowed)
        few = min(_SAMPLES, planned.samples)
        outcome = _run(planned.model_copy(update={"samples": few}), receive=receive)
        if outcome.has_failed and outcome.started is not None and few < planned.samples:
            outcome = _run(planned, receive=receive)
        if outcome.has_failed:
            raise outcome.error


def _plan(experiment: Experiment, here: Resources, *, allowed: tuple[str, ...]) -> BatchCheck:
    """Plan the check, with as many samples as a worker gets.

    Raises:
        ExperimentError: strategy, launcher and workers don't go together on any machine.
    """
    planned: Trial | None = None
    try:
        planned = make_plan(experiment, here, allowed=allowed).main
    except ResourceError:  # it is meant for another machine
        pass
    except ExperimentError:  # as may be this one
        make_plan(experiment, here.model_copy(update={"cpus": _MANY, "gpus": ("GPU",) * _MANY}))
    train, workers = experiment.train, experiment.parallel.workers
    share = -(-train.global_batch_size // (workers * train.gradient_accumulation))
    uses_gpu = bool(here.gpus) and experiment.parallel.device != "cpu"
    return BatchCheck(
        name="check",
        # Compiling takes longer than all else.
        experiment=experiment.model_copy(update={"train": train.model_copy(update={"compile": None})}),
        strategy=planned.strategy if planned else "single",
        options=planned.options if planned else {},
        launcher="inprocess",
        workers=1,
        devices_per_worker=int(uses_gpu),
        device="cuda" if uses_gpu else "cpu",
        cpus_per_worker=here.cpus,
        allowed=allowed,
        initial=initial_weights.find(experiment),
        samples=share,
        most_samples=share,
    )


def _run(trial: BatchCheck, *, receive: Callable[[AnyEvent], None]) -> Outcome:
    from pipeline.launch.inprocess import Launcher  # and torch with it

    with Launcher(Session(folder=Path(), receive=receive, parallel=trial.experiment.parallel)) as launcher:
        return launcher.launch(trial)


def _needed_bytes(experiment: Experiment, *, allowed: tuple[str, ...]) -> int:
    """Return the size of weights, gradients and optimizer state; 0 for a model that can't be built without memory."""
    with undisturbed():
        from pipeline.train import parts

    try:
        model = parts.outline(partial(components.build, allowed=allowed), experiment, with_task=False)
    except Exception as error:  # noqa: BLE001 - user code; the try raises what remains
        _log.info("the model can't be built without memory, so a batch is tried whatever its size", exc_info=error)
        return 0
    copies = {parameter: 2 + _STATES if parameter.requires_grad else 1 for parameter in model.parameters()}
    return sum(parameter.numel() * parameter.element_size() * count for parameter, count in copies.items())


def _free_bytes(experiment: Experiment) -> int:
    """Return the free memory of the device that would train."""
    if experiment.parallel.device != "cpu" and resources.detect().gpus:
        import torch

        return int(torch.cuda.mem_get_info()[0])
    return min([psutil.virtual_memory().available, *(limit.free for limit in find_memory_limits())])
