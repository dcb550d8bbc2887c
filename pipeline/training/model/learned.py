"""Parameters and buffers of a loss or task, such as a temperature or class centers, trained beside the model.

They are replicated on every rank, whatever the strategy: their gradients are summed once a step, after the last
backward pass. They form a separate parameter group of the optimizer.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.protocol.rank import Rank
from pipeline.tasks import Supervised

PREFIX = "task:"
"""Prefix of their names where they are listed with the model's parameters."""


def held_by(task: object) -> nn.Module:
    """Return the modules and parameters among the attributes of a task or its loss."""
    part = task.loss if isinstance(task, Supervised) else task
    if isinstance(part, nn.Module):
        return part
    holder = nn.Module()
    for name, value in getattr(part, "__dict__", {}).items():
        if isinstance(value, nn.Parameter):
            holder.register_parameter(name, value)
        elif isinstance(value, nn.Module):
            holder.add_module(name, value)
    return holder


def learned_by(task: object) -> nn.Module | None:
    """Return the task's modules and parameters; None if nothing of them changes in training."""
    held = held_by(task)
    return held if kept(held) else None


def trainable(learned: nn.Module | None) -> list[nn.Parameter]:
    """Return the parameters of the task that the optimizer trains."""
    return [one for one in learned.parameters() if one.requires_grad] if learned is not None else []


def kept(learned: nn.Module, *, trained: Iterable[nn.Parameter] = ()) -> dict[str, Tensor]:
    """Return the tensors that change in training by name, without frozen parameters and arguments of torch's losses.

    Parameters of the optimizer (``trained``) are included, also if code has frozen them since.
    """
    ids = set(map(id, trained))
    named = learned.named_parameters()
    own: dict[str, Tensor] = {name: one for name, one in named if one.requires_grad or id(one) in ids}
    constant = [one for one in learned.modules() if type(one).__module__ == "torch.nn.modules.loss"]
    arguments = {id(buffer) for module in constant for buffer in module.buffers(recurse=False)}
    return own | {name: one for name, one in learned.named_buffers() if id(one) not in arguments}


@torch.no_grad()
def take_from_first(learned: nn.Module, *, rank: Rank, buffers_only: bool = False) -> None:
    """Broadcast the values from rank 0. Collective."""
    if rank.world_size == 1:
        return
    for tensor in kept(learned).values():
        if not (buffers_only and isinstance(tensor, nn.Parameter)):
            content = tensor.detach().contiguous()
            dist.broadcast(content, src=0)
            tensor.copy_(content)


@torch.no_grad()
def exchange_gradients(parameters: Sequence[nn.Parameter], *, scale: float, device: torch.device) -> None:
    """Sum the gradients of parameters over all ranks, divided by the strategy's ``scale``. Collective.

    A parameter without a gradient on any rank stays without: the optimizer would let it decay.
    """
    for dtype in dict.fromkeys(one.dtype for one in parameters):
        chosen = [one for one in parameters if one.dtype == dtype]
        own = [torch.zeros_like(one) if one.grad is None else one.grad.to_dense() for one in chosen]
        has = torch.tensor([one.grad is not None for one in chosen], dtype=dtype, device=device)
        flat = torch.cat([*(one.reshape(-1) for one in own), has])
        flat /= scale
        dist.all_reduce(flat)
        *sums, seen = torch.split(flat, [*(one.numel() for one in chosen), len(chosen)])
        for index, (parameter, total) in enumerate(zip(chosen, sums, strict=True)):
            if parameter.grad is not None or seen[index]:
                parameter.grad = total.view_as(parameter).clone()


@contextmanager
def evaluating(learned: nn.Module | None) -> Iterator[None]:
    """Put the task's modules into evaluation mode inside the block, if they have trainable parameters."""
    modes = {one: one.training for one in learned.modules()} if learned is not None and trainable(learned) else {}
    for module in modes:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
