"""What ranks tell the driver besides metrics: where they run, the first step, memory, the trained model."""

import resource
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from pipeline.contract import Held
from pipeline.events import ArtifactSaved, FirstStep, ModelSaved, Outbox, Warned
from pipeline.training.collective import gather
from pipeline.training.curves import Curve
from pipeline.training.evaluation import resulting_weights
from pipeline.training.learned import kept, trainable
from pipeline.training.loader import to_device
from pipeline.training.norms import local
from pipeline.training.setup import Setup
from pipeline.wording import counted

_WEIGHTS, _EXAMPLE = "model/weights.pt", "model/example.pt"
MUCH = 0.2
"""Of the averages at the end of a training."""


def start(setup: Setup, outbox: Outbox) -> None:
    """All is built; training begins. Collective."""
    devices = gather(_device_name(setup), rank=setup.rank)
    if setup.rank.is_first:
        outbox.event(setup.started(tuple(devices)))


def first_step(setup: Setup, outbox: Outbox) -> None:
    """The first optimizer step has been queued; it is done when the device says so."""
    if setup.rank.is_first:
        if setup.device.type == "cuda":
            torch.cuda.synchronize(setup.device)
        outbox.event(FirstStep(time=time.time(), trial=setup.trial.name))


def compile_s(setup: Setup) -> float | None:
    """Seconds of the rank that has spent most on compiling; None where nothing is compiled. Collective."""
    return max(gather(setup.compiling.seconds, rank=setup.rank)) if setup.compiling is not None else None


def averaging(setup: Setup, outbox: Outbox) -> None:
    """Warn of averages that hardly forget the first weights in so short a training."""
    if setup.averages is None or setup.trial.is_measurement or not setup.rank.is_first:
        return
    if (share := setup.averages.share_of_start(setup.total_steps)) > MUCH:
        message = (
            f"train.ema: after {setup.total_steps} steps {int(100 * share)}% of the averages will still be the weights "
            "that averaging began with; write a smaller decay"
        )
        outbox.event(Warned(time=time.time(), trial=setup.trial.name, message=message))


def peak_memory_mb(setup: Setup) -> tuple[float, ...]:
    """Peak memory of each rank's devices in rank order: allocated on GPUs, resident on CPU. Collective."""
    if setup.device.type == "cuda":
        own = [torch.cuda.max_memory_allocated(device) / 2**20 for device in setup.gpus]
    else:
        unit = 2**20 if sys.platform == "darwin" else 2**10  # ru_maxrss is in bytes there, in KiB on Linux
        own = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit]
    return tuple(peak for peaks in gather(own, rank=setup.rank) for peak in peaks)


def held(setup: Setup) -> Held:
    """What each rank keeps from step to step, by its tensors' sizes. Collective."""
    parameters = list(setup.whole.parameters())
    gradients = [parameter for parameter in parameters if parameter.requires_grad]
    states = [value for state in setup.optimizer.state.values() for value in state.values()]
    averages = setup.averages.tensors.values() if setup.averages is not None else ()
    tensors = [*parameters, *gradients, *averages, *(value for value in states if isinstance(value, torch.Tensor))]
    own = sum(part.numel() * part.element_size() for part in map(local, tensors)) / 2**20
    return Held(mb=tuple(gather(own, rank=setup.rank)), cut=setup.strategy.describe())


def gradient_mb(model: nn.Module) -> float:
    """Size of all gradients of one replica."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad) / 2**20


def coupling_layers(model: nn.Module) -> tuple[str, ...]:
    """Kinds of layers whose result depends on how a global batch is dealt to ranks.

    Batch statistics are those of a rank's share, and each rank draws its own dropout masks.
    """
    coupled = (
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm) or (isinstance(module, _DropoutNd) and module.p > 0)
    )
    return tuple(dict.fromkeys(type(module).__name__.removeprefix("FSDP") for module in coupled))


def model(setup: Setup, outbox: Outbox) -> None:
    """Send the trained weights, and a small example input so that the model can be given a signature. Collective."""
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.pt"
        beside = "loss.pt" if setup.experiment.task is None else "task.pt"
        with resulting_weights(setup):
            state = setup.strategy.weights(setup.wrapped, setup.model)
            if setup.rank.is_first:
                torch.save({name: value.cpu() for name, value in state.items()}, weights)
                _save_learned(setup, Path(folder) / beside)
        if not setup.rank.is_first:
            return
        outbox.file(weights, _WEIGHTS)
        if trainable(setup.learned):
            outbox.file(Path(folder) / beside, f"model/{beside}")
        if not setup.experiment.tracking.log_model:
            return
        if trainable(setup.learned):
            outbox.event(ArtifactSaved(time=time.time(), trial=setup.trial.name, path=f"model/{beside}"))
        example = _example(setup)
        if example is not None:
            path = Path(folder) / "example.pt"
            torch.save(example, path)
            outbox.file(path, _EXAMPLE)
        place = "" if example is None else _EXAMPLE
        outbox.event(ModelSaved(time=time.time(), trial=setup.trial.name, weights=_WEIGHTS, example=place))


def curve(name: str, curve: Curve, *, setup: Setup, outbox: Outbox) -> None:
    """Send a curve of the last evaluation, as CSV and PNG."""
    if not setup.rank.is_first:
        return
    with tempfile.TemporaryDirectory() as folder:
        table, picture = Path(folder) / "curve.csv", Path(folder) / "curve.png"
        curve.write(table)
        curve.draw(picture, title=name)
        for path in (table, picture):
            place = f"metrics/{quote(name, safe='')}{path.suffix}"
            outbox.file(path, place)
            outbox.event(ArtifactSaved(time=time.time(), trial=setup.trial.name, path=place))


def _save_learned(setup: Setup, path: Path) -> None:
    """Write what the task has learned besides the model, if it has."""
    if setup.learned is not None:
        torch.save({name: value.detach().cpu() for name, value in kept(setup.learned).items()}, path)


def _example(setup: Setup) -> torch.Tensor | None:
    """The inputs of two training samples; None for batches whose inputs are not a single tensor."""
    batch = setup.train_loader.read(list(range(min(2, setup.order.samples))))
    inputs = batch[0] if isinstance(batch, tuple | list) and batch else None
    if not isinstance(inputs, torch.Tensor):
        return None
    moved: torch.Tensor = to_device(inputs, device=torch.device("cpu"), dtype=setup.input_dtype)
    return moved


def _device_name(setup: Setup) -> str:
    if setup.device.type == "cuda":
        return f"{setup.rank.node} {setup.device} {torch.cuda.get_device_name(setup.device)}"
    return f"{setup.rank.node} cpu, {counted(torch.get_num_threads(), 'thread')}"
