"""Rank-local state: gathered on rank 0 for a checkpoint, and returned to its rank on resuming.

It is the strategy's state, such as PowerSGD's errors, and in local SGD, where ranks step independently, all of the
training state. It is valid only for the same number of ranks and the same strategy options.
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
"""Keys in a checkpoint."""


def gather(context: TrainContext) -> State:
    """Gather the rank-local state on rank 0, on the CPU; empty on other ranks, or if there is none. Collective."""
    local = context.strategy.local_updates
    state = view(context) if local is not None and local.has_diverged else State({}, None)
    tensors = {f"{OWN}/{name}": tensor for name, tensor in state.tensors.items()}
    if (own := context.strategy.state_dict()) is None and not tensors:
        return State({}, {})
    value = split(own, name=KEY, tensors=tensors)
    gathered: dict[str, Tensor] = {}
    for name, tensor in sorted(tensors.items()):
        parts = _gathered(tensor, context=context)
        gathered.update({_key(rank, name): part.to("cpu", copy=True) for rank, part in enumerate(parts)})
    return State(gathered, {KEY: {"of": _owner(context), "value": value, OWN: state.values}})


def load(context: TrainContext, state: State, *, warn: Callable[[str], None]) -> None:
    """Load each rank's own state, or warn that it is dropped. Call it after a backward pass."""
    saved: Mapping[str, Json] | None = state.values.get(KEY)
    if context.strategy.state_dict() is None and not (saved and saved.get(OWN)):
        return
    if saved is not None and saved.get(OWN) and saved["of"] != _owner(context):
        warn(
            f"the weights of {saved['of']['workers']} workers, which differed in local SGD, were averaged: "
            "the losses will differ from those of an uninterrupted run"
        )
        return
    if saved is None or saved["of"] != _owner(context):
        before = f"{saved['of']['workers']} workers" if saved else "a run without this state"
        warn(
            f"the rank-local state of {context.trial.strategy} was dropped, since the checkpoint is from {before} or "
            "from different parallel.options. Training continues, but losses differ from an uninterrupted run."
        )
        return
    rank = context.rank.rank
    tensors = {name: state.tensors.get(_key(rank, name), tensor) for name, tensor in state.tensors.items()}
    if (own := join(saved["value"], tensors)) is not None:
        context.strategy.load_state_dict(own)
    if saved.get(OWN):
        mine = {name.removeprefix(f"{OWN}/"): tensor for name, tensor in tensors.items() if name.startswith(f"{OWN}/")}
        restore(context, State(mine, saved[OWN]))


def _gathered(tensor: Tensor, *, context: TrainContext) -> list[Tensor]:
    """Gather each rank's tensor on rank 0; empty on other ranks."""
    if context.rank.world_size == 1:
        return [tensor]
    sent = tensor.to(context.device).contiguous()  # NCCL sends from GPUs only
    parts = [torch.empty_like(sent) for _ in range(context.rank.world_size)] if context.rank.is_first else None
    dist.gather(sent, parts)
    return parts or []


def _key(rank: int, name: str) -> str:
    """Return the name of a rank's tensor; rank 0's is the name that the JSON value refers to."""
    return f"{name}@{rank}" if rank else name


def _owner(context: TrainContext) -> dict[str, Any]:
    return {"workers": context.rank.world_size, "options": context.strategy.options.model_dump(mode="json")}
