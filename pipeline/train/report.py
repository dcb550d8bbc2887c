"""Reports of ranks to the driver besides metrics: devices, the first step, memory, the trained model."""

import logging
import resource
import sys
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeline.protocol import progress
from pipeline.protocol.events import (
    EXAMPLE,
    REFERENCE,
    WEIGHTS,
    FirstStep,
    ModelExported,
    ModelSaved,
    Outbox,
    Started,
    Warned,
)
from pipeline.protocol.trial import Training
from pipeline.protocol.trial_result import Best
from pipeline.tasks import FromModel
from pipeline.train.evaluate import callable_model, forward, full_state_dict, resulting_weights, share_buffers
from pipeline.train.exported import Example, write_mlflow_model
from pipeline.train.kept import keep_buffers
from pipeline.train.names import TASK
from pipeline.train.order import keep_generators
from pipeline.train.ranks import call_on_ranks, gather, local, matmul_precision, synchronize
from pipeline.train.reference import ModelCall, Reference, record
from pipeline.train.state import DTYPES, State
from pipeline.train.watch import waiting
from pipeline.wording import counted

_MLFLOW_MODEL = "model/mlflow"
_log = logging.getLogger(__name__)


def start(s: State) -> None:
    """Report that training begins, and on which devices. Collective."""
    name = f"{s.rank.node} cpu, {counted(torch.get_num_threads(), 'thread')}"
    if s.device.type == "cuda":
        name = f"{s.rank.node} {s.device} {torch.cuda.get_device_name(s.device)}"
    devices = gather(name, rank=s.rank)
    if not s.rank.is_first:
        return
    train, is_training = s.experiment.train, isinstance(s.trial, Training)
    s.send(
        Started(
            trial=s.trial.name,
            total_steps=s.steps,
            limit_s=None if train.minutes is None else 60 * train.minutes,
            steps_per_epoch=s.order.steps_per_epoch,
            epochs=s.epoch_of(s.steps),
            train_samples=s.order.set_size,
            epoch_samples=s.order.samples,
            validation_samples=s.batches.size("validation"),
            parameters=sum(one.numel() for one in s.trainee.parameters() if one.requires_grad),
            devices=tuple(devices),
            data_name=s.experiment.data.target,
            data_digest=s.batches.digest if is_training else "",
            data_version=s.batches.version,
            frozen=sum(one.numel() for one in s.model.parameters() if not one.requires_grad) if train.freeze else 0,
            loaded=s.loaded,
        )
    )
    own = sum(one.numel() for name, one in s.trainable.items() if name.startswith(TASK))
    if own and is_training:
        progress.note(f"the task adds {counted(own, 'trained parameter', spec=',')}", subject="task")


def first_step(s: State) -> None:
    """Report the first optimizer step, once the device has finished it."""
    if s.rank.is_first:
        with waiting():
            synchronize(s.device)
        s.send(FirstStep(trial=s.trial.name))


def report_matmul_precision(s: State) -> None:
    """Warn if code of the experiment has changed ``train.matmul_precision``."""
    declared, used = s.experiment.train.matmul_precision, matmul_precision()
    if declared not in (None, used):
        s.warn(
            f"train.matmul_precision is {declared}, but user code set {used}, which is used. Remove "
            "torch.set_float32_matmul_precision or fp32_precision there, or train.matmul_precision from the file."
        )


def peaks_mb(s: State) -> list[float]:
    """Return the peak memory of this rank's devices in MiB: allocated on GPUs, resident on CPU."""
    if s.device.type == "cuda":
        return [torch.cuda.max_memory_allocated(device) / 2**20 for device in s.strategy.gpus]
    unit = 2**20 if sys.platform == "darwin" else 2**10  # ru_maxrss is in bytes on macOS, in KiB on Linux
    return [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit]


def held_mb(s: State) -> float:
    """Return the size of the tensors that this rank keeps between steps, in MiB."""
    parameters = list(s.trainee.parameters())
    gradients = [one for one in parameters if one.requires_grad]
    states = [list(one.state.values()) for one in s.optimizers.values()], [hook.state_dict() for hook in s.hooks]
    tensors = [*parameters, *gradients, *(one for one in tree_leaves(states) if isinstance(one, Tensor))]
    return float(sum(part.numel() * part.element_size() for part in map(local, tensors)) / 2**20)


def model(s: State, *, folder: Path, best: Best | None = None) -> None:
    """Send weights, example inputs, and the outputs for them; keep all in ``folder``. Collective."""
    weights, outbox = folder / WEIGHTS, s.outbox
    weights.parent.mkdir()
    assert outbox is not None

    def send() -> None:
        torch.save(tree_map_only(Tensor, Tensor.cpu, dict(state)), weights)
        outbox.file(weights, WEIGHTS)

    with resulting_weights(s):
        state = full_state_dict(s)
        call_on_ranks(send, what=f"{s.trial.name}: weights sent", rank=s.rank)
        inputs, computed = example_of(s)
    if not s.rank.is_first:
        return
    if inputs is not None:
        torch.save(inputs, folder / EXAMPLE)
        outbox.file(folder / EXAMPLE, EXAMPLE)
    computed.save(folder / REFERENCE)
    outbox.file(folder / REFERENCE, REFERENCE)
    tracking = s.experiment.tracking
    if tracking.log_model:
        to = tracking.register_model
        s.send(
            ModelSaved(
                trial=s.trial.name,
                weights=WEIGHTS,
                example="" if inputs is None else EXAMPLE,
                step=best.step if best else None,
                registered=to.name if to is not None else "",
                alias=(to.alias if to is not None else None) or "",
            )
        )


def exported_model(trial: Training, outbox: Outbox | None, *, folder: Path) -> None:
    """Write the model as MLflow keeps it, and send it; one that can't be saved is left to MLflow's own process."""
    if outbox is None or not (trial.exports and trial.experiment.tracking.log_model and (folder / EXAMPLE).exists()):
        return
    path, told = folder / _MLFLOW_MODEL, list[str]()
    try:
        with progress.ProgressReporter("exporting the model"):
            write_mlflow_model(trial.experiment, path, folder=folder, allowed=trial.allowed, warn=told.append)
    except Exception as error:  # noqa: BLE001 - user code, and whatever torch.export can't trace
        _log.warning("the model can't be exported", exc_info=error)
        return
    for message in told:
        outbox.event(Warned(trial=trial.name, message=message))
    for file in sorted(path.rglob("*")):
        if file.is_file():
            outbox.file(file, f"{_MLFLOW_MODEL}/{file.relative_to(path)}")
    outbox.event(ModelExported(trial=trial.name, program=_MLFLOW_MODEL, torch=torch.__version__))


def example_of(s: State) -> tuple[Example | None, Reference]:
    """Return the model's inputs for two training samples, on the CPU, and what it computes for them. Collective.

    Inputs are those that the task calls the model with: a tensor, or tensors by name; None if they aren't tensors.
    """
    share_buffers(s)
    s.trainee.eval()
    with keep_buffers(s.trainee), torch.compiler.set_stance("force_eager"):  # compiling takes longer than all else
        placed = _call_of(s)
        example = _name_arguments(s.model, placed) if placed is not None else None
        if example is not None:
            placed = ModelCall.of(example)
        is_lower = s.experiment.train.precision in DTYPES
        is_exact = s.device.type == "cpu" and matmul_precision() == "highest"
        with callable_model(s):
            reference = record(
                s.model,
                placed,
                device=s.device,
                is_exact=is_exact and not (is_lower and s.strategy.casts),
                runtime=s.batches.runtime,
            )
    s.wrapped.train()
    return tree_map_only(Tensor, Tensor.cpu, example), reference


def _call_of(s: State) -> ModelCall | None:
    """Return the task's first call of the model for two training samples; None if it can't be found.

    A task that calls only parts of the model, as a GAN's, is taken to call the whole with the batch's first part.
    """
    batch = s.batches.place(s.batches.read(list(range(min(2, s.batches.readable)))))
    if isinstance(s.task, FromModel) and isinstance(batch, Mapping):
        return ModelCall((), s.task.inputs(batch))
    calls: list[ModelCall] = []

    def note(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(ModelCall(args, kwargs))

    handle = s.model.register_forward_pre_hook(note, prepend=True, with_kwargs=True)
    try:
        with torch.no_grad(), keep_generators():
            forward(s, batch)
    except Exception as error:  # noqa: BLE001 - user code may raise anything, after its call, too
        _log.warning("the task can't be called for two samples", exc_info=error)
    finally:
        handle.remove()
    if calls:
        return ModelCall(*tree_map_only(Tensor, Tensor.contiguous, tuple(calls[0])))
    return ModelCall.of(batch[0]) if isinstance(batch, tuple | list) and batch else None


def _name_arguments(model: torch.nn.Module, call: ModelCall) -> Example | None:
    """Return a single positional tensor as it is, and several by name; those that are None are left out."""
    args, kwargs = call.args, {name: one for name, one in call.kwargs.items() if one is not None}
    if len(args) == 1 and not kwargs:
        return args[0] if isinstance(args[0], Tensor) and len(args[0]) else None
    try:
        named = dict(signature(model.forward).bind_partial(*args).arguments) if args else {}
    except (TypeError, ValueError):  # a traced program of TorchScript has no signature
        return None
    named = {name: one for name, one in (*named.items(), *kwargs.items()) if one is not None}
    return named if named and all(isinstance(one, Tensor) for one in named.values()) else None
