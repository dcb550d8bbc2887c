"""Model, task and strategy of a training, built from the experiment and checked for their type."""

from typing import cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pipeline import registry
from pipeline.errors import ExperimentError
from pipeline.experiment.schema import Experiment
from pipeline.experiment.values import Component, Create
from pipeline.protocol.trial import Rank, Trial
from pipeline.strategies.base import Strategy
from pipeline.tasks import Supervised, Trainee
from pipeline.train.names import TASK
from pipeline.train.order import keep_generators, mix, seed_all
from pipeline.wording import counted


def seeded_model(create: Create, experiment: Experiment) -> nn.Module:
    """Build the model on the CPU, with the same random numbers on all ranks and each time that it is built."""
    seed_all(model_seed(experiment), _seeded_device())  # whatever the data drew
    model = create(experiment.model, key="model")
    if not isinstance(model, nn.Module):
        raise ExperimentError.of(
            "model", f"{experiment.model.target} returned a {type(model).__name__}; it must return a torch.nn.Module"
        )
    if lazy := [name for name, layer in model.named_modules() if any(map(is_lazy, layer.parameters(recurse=False)))]:
        layer = model.get_submodule(lazy[0])
        raise ExperimentError.of(
            "model",
            f"the {type(layer).__name__} {lazy[0]!r} has no size before its first batch, but workers need the weights "
            "earlier. Set its size, or call the model on zeros of a sample's shape in its constructor.",
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ExperimentError.of("model", f"{experiment.model.target} has no trainable parameters")
    for module in model.modules():  # what ``expand`` returns can't be written, nor restored
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.layout == torch.strided and 0 in buffer.stride():
                module._buffers[name] = buffer.contiguous()
    return convert_to_double(model) if experiment.train.precision == "fp64" else model


def model_seed(experiment: Experiment) -> int:
    """Return the seed of the model's constructor."""
    return mix(experiment.seed, "model")


def _seeded_device() -> torch.device | None:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


def convert_to_double(module: nn.Module) -> nn.Module:
    """Convert a module to fp64 and complex128; ``module.to(torch.float64)`` would drop imaginary parts."""
    for own in (*module.parameters(), *module.buffers()):
        if own.is_complex():
            own.data = own.data.to(torch.complex128)
    return module.double()


def build_trainee(create: Create, experiment: Experiment, model: nn.Module) -> Trainee:
    """Build the experiment's task, or the default task around its loss, and join it with the model."""
    seed_all(mix(experiment.seed, "task"), _seeded_device())  # equal on all ranks, whatever the model drew
    if experiment.task is not None:
        task = create(experiment.task, key="task")
    else:
        declared = cast(Component, experiment.loss)
        task = Supervised(create(declared, key="loss"), ignores="ignore_index" in declared.arguments)
    if not callable(task):
        raise ExperimentError.of("task", f"is a {type(task).__name__}, which can't be called with a model and a batch")
    trainee = Trainee(model, task)
    if experiment.train.precision == "fp64":
        convert_to_double(trainee.task)
    clashing = [name for name, _ in model.named_parameters() if name.startswith(TASK)]
    if clashing and any(True for _ in trainee.task.parameters()):
        message = f"has a part named task ({clashing[0]}), whose names are those of the task's parameters; rename it"
        raise ExperimentError.of("model", message)
    return trainee


def outline(create: Create, experiment: Experiment, *, with_task: bool) -> nn.Module:
    """Build model and, if asked, task on the meta device: the parameters' names and shapes, without memory for them."""
    with keep_generators(), torch.device("meta"):
        model = seeded_model(create, experiment)
        if with_task:
            return build_trainee(create, experiment, model)
        holder = nn.Module()
        holder.model = model
        return holder


def build_strategy(trial: Trial, *, device: torch.device, rank: Rank, compute_dtype: torch.dtype | None) -> Strategy:
    """Build the trial's strategy with its options and the GPUs of this process."""
    kind = registry.load("strategies", trial.strategy).Strategy
    options = kind.Options.model_validate(trial.options)
    made = cast(Strategy, kind(options, device=device, world_size=rank.world_size, compute_dtype=compute_dtype))
    if device.type != "cpu":
        count, visible = max(1, trial.devices_per_worker), torch.cuda.device_count()
        if device.index + count > visible:
            raise ExperimentError.of(
                "parallel.gpus_per_worker",
                f"{trial.strategy} needs {counted(count, 'GPU')} in one process, but rank {rank.rank} on {rank.node} "
                f"can use {visible}. Make the others visible with CUDA_VISIBLE_DEVICES, or set gpus_per_worker: "
                f"{max(1, visible)}.",
            )
        made.gpus = range(device.index, device.index + count)
    return made
