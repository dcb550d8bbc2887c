"""Reports of ranks to the driver besides metrics: devices, the first step, memory, the trained model."""

import logging
import resource
import sys
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeline.protocol.events import (
    EXAMPLE,
    REFERENCE,
    WEIGHTS,
    ArtifactSaved,
    FirstStep,
    ModelExported,
    ModelSaved,
    Outbox,
    Started,
    Warned,
)
from pipeline.protocol.progress import ProgressReporter
from pipeline.protocol.trial import Training
from pipeline.protocol.trial_result import Best, Held
from pipeline.training.context import TrainContext
from pipeline.training.evaluation.held_out import full_state_dict, resulting_weights
from pipeline.training.model import frozen, gradient_hooks
from pipeline.training.model.learned import kept, trainable
from pipeline.training.model.metrics import Drawable
from pipeline.training.ranks.collectives import call_on_first, gather
from pipeline.training.ranks.matmul_precision import TF32_CAPABILITY, matmul_precision
from pipeline.training.ranks.norms import local
from pipeline.training.ranks.watch import waiting
from pipeline.training.result.example import example_of, reference_of
from pipeline.training.result.exported_model import check_memory, export, trained_model
from pipeline.training.result.reference import Reference
from pipeline.wording import counted

_PROGRAM, _SAMPLES = "model/model.pt2", "model/example.npz"
_log = logging.getLogger(__name__)


def start(context: TrainContext, outbox: Outbox) -> None:
    """Report that training begins, and on which devices. Collective."""
    devices = gather(_device_name(context), rank=context.rank)
    if context.rank.is_first:
        outbox.event(
            Started(
                trial=context.trial.name,
                total_steps=context.steps,
                limit_s=None if (minutes := context.experiment.train.minutes) is None else 60 * minutes,
                steps_per_epoch=context.order.steps_per_epoch,
                epochs=context.epochs,
                train_samples=context.order.set_size,
                epoch_samples=context.order.samples,
                validation_samples=context.batches.validation_samples,
                parameters=sum(p.numel() for p in context.whole.parameters() if p.requires_grad),
                devices=tuple(devices),
                data_name=context.experiment.data.target,
                data_digest=context.batches.digest if isinstance(context.trial, Training) else "",
                data_version=context.batches.version,
                frozen=frozen.count(context.model) if context.experiment.train.freeze else 0,
                loaded=context.built.loaded,
            )
        )
        several = context.rank.world_size * context.accumulation
        hooks = gradient_hooks.format_warning(context.built.hooked, micro_batches=several)
        for message in filter(None, (context.seen.unexamined, hooks)):
            outbox.event(Warned(trial=context.trial.name, message=message))


def first_step(context: TrainContext, outbox: Outbox) -> None:
    """Report the first optimizer step, once the device has finished it."""
    if context.rank.is_first:
        if context.device.type == "cuda":
            with waiting() if context.rank.world_size > 1 else nullcontext():
                torch.cuda.synchronize(context.device)
        outbox.event(FirstStep(trial=context.trial.name))


def warn_of_reading(context: TrainContext, outbox: Outbox) -> None:
    """Warn once if the training set is read one sample at a time although it can read batches."""
    note = context.batches.take_note()
    if note and context.rank.is_first:
        outbox.event(Warned(trial=context.trial.name, message=note, subject="reading"))


def warn_of_metrics(context: TrainContext, outbox: Outbox, message: str) -> None:
    """Warn once of metrics whose values are doubtful."""
    if context.rank.is_first:
        outbox.event(Warned(trial=context.trial.name, message=message, subject="metrics"))


def changed_matmul_precision(context: TrainContext, outbox: Outbox) -> None:
    """Warn if code of the experiment has changed ``train.matmul_precision``."""
    declared, used = context.experiment.train.matmul_precision, matmul_precision()
    if declared not in (None, used) and context.rank.is_first:
        message = (
            f"train.matmul_precision is {declared}, but user code set {used}, which is used. Remove "
            "torch.set_float32_matmul_precision or fp32_precision there, or train.matmul_precision from the file."
        )
        outbox.event(Warned(trial=context.trial.name, message=message))


def compile_s(context: TrainContext) -> float | None:
    """Return the compile time of the slowest rank in seconds; None if nothing is compiled. Collective."""
    return (
        max(gather(context.built.compiling.seconds, rank=context.rank)) if context.built.compiling is not None else None
    )


def peak_memory_mb(context: TrainContext) -> tuple[float, ...]:
    """Gather the peak memory of all devices in MiB, in rank order: allocated on GPUs, resident on CPU. Collective."""
    if context.device.type == "cuda":
        own = [torch.cuda.max_memory_allocated(device) / 2**20 for device in context.gpus]
    else:
        unit = 2**20 if sys.platform == "darwin" else 2**10  # ru_maxrss is in bytes on macOS, in KiB on Linux
        own = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit]
    return tuple(peak for peaks in gather(own, rank=context.rank) for peak in peaks)


def held(context: TrainContext) -> Held:
    """Gather the size of the tensors that each rank keeps between steps, in MiB. Collective."""
    parameters = list(context.whole.parameters())
    gradients = [parameter for parameter in parameters if parameter.requires_grad]
    states = [value for state in context.optimizer.state.values() for value in state.values()]
    states += [feature.state_dict() for feature in context.features]
    tensors = [*parameters, *gradients, *(one for one in tree_leaves(states) if isinstance(one, torch.Tensor))]
    own = sum(part.numel() * part.element_size() for part in map(local, tensors)) / 2**20
    return Held(
        mb=tuple(gather(own, rank=context.rank)), cut=context.sharded.describe() if context.sharded is not None else ""
    )


def gpus(context: TrainContext) -> tuple[str, ...]:
    """Gather the names of all GPUs, in rank order; none on CPU. Collective."""
    own = [torch.cuda.get_device_name(device) for device in context.gpus]
    return tuple(name for names in gather(own, rank=context.rank) for name in names)


def has_tf32(context: TrainContext) -> bool:
    """Return True if each GPU has tensor cores for TF32, from compute capability 8.0 on. Collective."""
    own = [torch.cuda.get_device_capability(device) >= TF32_CAPABILITY for device in context.gpus]
    found = [each for ranks in gather(own, rank=context.rank) for each in ranks]
    return bool(found) and all(found)


def gradient_mb(model: nn.Module) -> float:
    """Return the size of a replica's gradients in MiB."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad) / 2**20


def model(context: TrainContext, outbox: Outbox, *, folder: Path, best: Best | None = None) -> None:
    """Send the trained weights, example inputs, and the model's outputs for them; keep all in ``folder``. Collective.

    ``best`` is the step that the weights are of; None for the last.
    """
    weights, example, reference = folder / WEIGHTS, folder / EXAMPLE, folder / REFERENCE
    weights.parent.mkdir()
    beside = "model/loss.pt" if context.experiment.task is None else "model/task.pt"
    with resulting_weights(context):
        state = full_state_dict(context)
        send = partial(_send_weights, context, state, outbox=outbox, weights=weights, learned=beside)
        call_on_first(send, what=f"{context.trial.name}: weights sent", rank=context.rank)
        inputs = example_of(context)
        computed = reference_of(context, inputs)
    if not context.rank.is_first:
        return
    if inputs is not None:
        torch.save(inputs, example)
        outbox.file(example, EXAMPLE)
    computed.save(reference, has_example=inputs is not None)
    outbox.file(reference, REFERENCE)
    if not context.experiment.tracking.log_model:
        return
    if trainable(context.learned):
        outbox.event(ArtifactSaved(trial=context.trial.name, path=beside))
    place = "" if inputs is None else EXAMPLE
    step = best.step if best else None
    to = context.experiment.tracking.register_model
    registry = {"registered": to.name, "alias": to.alias or ""} if to is not None else {}
    outbox.event(ModelSaved(trial=context.trial.name, weights=WEIGHTS, example=place, step=step, **registry))


def exported_model(trial: Training, outbox: Outbox, *, folder: Path) -> None:
    """Export the model whose weights and example are in ``folder``, if both are, and send it.

    A model that can't be exported, for which too little memory is left, or that computes something else when it is
    built again, is left to the process that writes to MLflow, which warns of it.
    """
    weights, example, program, samples = (folder / name for name in (WEIGHTS, EXAMPLE, _PROGRAM, _SAMPLES))
    if not (trial.exports and trial.experiment.tracking.log_model and example.exists()):
        return
    try:
        check_memory(weights)
        with ProgressReporter("exporting the model"):
            reference = Reference.load(folder)
            module = trained_model(trial.experiment, torch.load(weights), allowed=trial.allowed, reference=reference)
            export(module, torch.load(example), program=program, samples=samples)
    except Exception as error:  # noqa: BLE001 - user code, and whatever torch.export can't trace
        _log.warning("the model can't be exported", exc_info=error)
        return
    outbox.file(program, _PROGRAM)
    outbox.file(samples, _SAMPLES)
    outbox.event(ModelExported(trial=trial.name, program=_PROGRAM, samples=_SAMPLES, torch=torch.__version__))


def curve(name: str, curve: Drawable, *, context: TrainContext, outbox: Outbox) -> None:
    """Send a curve or a large result of the last evaluation as CSV and PNG."""
    if not context.rank.is_first:
        return
    with tempfile.TemporaryDirectory() as folder:
        table, picture = Path(folder) / "curve.csv", Path(folder) / "curve.png"
        curve.write(table)
        curve.draw(picture, title=name)
        for path in (table, picture):
            place = f"metrics/{quote(name, safe='')}{path.suffix}"
            outbox.file(path, place)
            outbox.event(ArtifactSaved(trial=context.trial.name, path=place))


def _send_weights(
    context: TrainContext, state: Mapping[str, Any], *, outbox: Outbox, weights: Path, learned: str
) -> None:
    """Save and send the model's weights with extra state, and those of the task, if it has any."""
    torch.save(tree_map_only(torch.Tensor, torch.Tensor.cpu, dict(state)), weights)
    outbox.file(weights, WEIGHTS)
    if context.learned is None:
        return
    own = kept(context.learned, trained=context.parameters)
    path = weights.with_name(Path(learned).name)
    torch.save({name: value.detach().cpu() for name, value in own.items()}, path)
    if trainable(context.learned):
        outbox.file(path, learned)


def _device_name(context: TrainContext) -> str:
    if context.device.type == "cuda":
        return f"{context.rank.node} {context.device} {torch.cuda.get_device_name(context.device)}"
    return f"{context.rank.node} cpu, {counted(torch.get_num_threads(), 'thread')}"
