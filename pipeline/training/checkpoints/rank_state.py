"""What each rank has by itself: gathered for a checkpoint, given back.

That is what its strategy remembers, such as PowerSGD's errors, and where ranks step by themselves (local SGD) all of
its state. It means something only to as many ranks with the same options.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.training.checkpoints.encoding import Json, join, split
from pipeline.training.checkpoints.state import State, restore, view
from pipeline.training.context import TrainContext

KEY, OWN = "memory", "own"
"""Names in a checkpoint."""


def collect(context: TrainContext) -> State:
    """What all ranks remember, on rank 0, on the CPU; nothing elsewhere, or if nobody does. Collective."""
    state = view(context) if context.strategy.diverges else State({}, None)
    tensors = {f"{OWN}/{name}": tensor for name, tensor in state.tensors.items()}
    if (remembered := context.strategy.state_dict()) is None and not tensors:
        return State({}, {})
    value = split(remembered, name=KEY, tensors=tensors)
    gathered: dict[str, Tensor] = {}
    for name, tensor in sorted(tensors.items()):
        parts = _gathered(tensor, context=context)
        gathered.update({_of(rank, name): part.to("cpu", copy=True) for rank, part in enumerate(parts)})
    return State(gathered, {KEY: {"of": _owner(context), "value": value, OWN: state.values}})


def hand_out(context: TrainContext, state: State, *, warn: Callable[[str], None]) -> None:
    """Give each rank its own back, or say that it begins without. Call it after a backward pass."""
    saved: Mapping[str, Json] | None = state.values.get(KEY)
    if context.strategy.state_dict() is None and not (saved and saved.get(OWN)):
        return
    if saved is not None and saved.get(OWN) and saved["of"] != _owner(context):
        warn(
            f"the weights of {saved['of']['workers']} workers, each of which had its own in local SGD, are averaged: "
            "the losses won't be those of a run that wasn't interrupted"
        )
        return
    if saved is None or saved["of"] != _owner(context):
        before = f"{saved['of']['workers']} workers" if saved else "a run without it"
        warn(
            f"what {context.trial.strategy} had left to send is forgotten: the checkpoint is that of {before}, or of "
            "other parallel.options; the losses won't be those of a run that wasn't interrupted"
        )
        return
    rank = context.rank.rank
    tensors = {name: state.tensors.get(_of(rank, name), tensor) for name, tensor in state.tensors.items()}
    if (remembered := join(saved["value"], tensors)) is not None:
        context.strategy.load_state_dict(remembered)
    if saved.get(OWN):
        mine = {name.removeprefix(f"{OWN}/"): tensor for name, tensor in tensors.items() if name.startswith(f"{OWN}/")}
        restore(context, State(mine, saved[OWN]))


def _gathered(tensor: Tensor, *, context: TrainContext) -> list[Tensor]:
    """Each rank's tensor, on rank 0."""
    if context.rank.world_size == 1:
        return [tensor]
    sent = tensor.to(context.device).contiguous()  # not every backend sends from everywhere
    parts = [torch.empty_like(sent) for _ in range(context.rank.world_size)] if context.rank.is_first else None
    dist.gather(sent, parts)
    return parts or []


def _of(rank: int, name: str) -> str:
    """The name of a rank's tensor; rank 0's has the one that the value refers to."""
    return f"{name}@{rank}" if rank else name


def _owner(context: TrainContext) -> dict[str, Any]:
    return {"workers": context.rank.world_size, "options": context.strategy.options.model_dump(mode="json")}
