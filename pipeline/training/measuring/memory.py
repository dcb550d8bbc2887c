"""Memory of a GPU on which rank 0 keeps other trials next to its part of a training."""

import torch
from torch import nn

from pipeline.training.context import TrainContext
from pipeline.training.model.several_optimizers import each_of
from pipeline.training.ranks.rank_gpus import forget_memory


def find_passing_bytes(device: torch.device) -> int:
    """Return the most bytes that were in use in addition to those in use now; 0 on the CPU."""
    if device.type == "cpu":
        return 0
    return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)


def check_free_memory(device: torch.device, *, needed: int) -> None:
    """Check that a GPU has memory for a training's next step, in which a rank that fails leaves the others waiting.

    Raises:
        torch.OutOfMemoryError: it has less than ``needed`` bytes.
    """
    if device.type == "cpu":
        return
    reserved = torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    # The driver does not know the limit that a process has set itself.
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total) - reserved
    if (free := min(free, allowed) + reserved - torch.cuda.memory_allocated(device)) < needed:
        message = f"the next training step needs {needed / 2**20:,.0f} MiB, but {free / 2**20:,.0f} MiB are free"
        raise torch.OutOfMemoryError(message)


def free_training(context: TrainContext) -> None:
    """Free weights, gradients, averages and optimizer state of a training that takes no further step.

    The shards of a sharded model stay: torch keeps references to them. Buffers and frozen weights are taken out of the
    model instead of emptied: user code may share them, such as a constant or a cached teacher that the next model gets.
    """
    context.optimizer.zero_grad(set_to_none=True)
    for optimizer in each_of(context.optimizer):
        optimizer.state.clear()
    context.features, context.assembled = (), {}  # averages of the weights
    context.built = context.built._replace(wrapped=context.model)  # DDP keeps buckets of gradients
    for module in context.whole.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.new_empty(0)
        for name, parameter in module._parameters.items():
            if parameter is None or hasattr(parameter, "device_mesh"):
                continue
            if parameter.requires_grad:
                parameter.data = parameter.new_empty(0)
            else:
                module._parameters[name] = nn.Parameter(parameter.new_empty(0), requires_grad=False)
    if context.built.compiling is not None:
        torch._dynamo.reset()  # CUDA graphs keep memory
    forget_memory(context.device)
