"""Checks of a training by what it was built of and by its first batch and step. Most warn once; none guesses again."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from pipeline.errors import ExperimentError
from pipeline.protocol.trial import Training
from pipeline.protocol.trial_result import BATCH_TRANSFORM, RANDOM_NUMBERS
from pipeline.tasks import LanguageModel, Supervised, gathering
from pipeline.tasks.trainee import AsModule, count_samples
from pipeline.train.kept import keep_buffers
from pipeline.train.names import find_trainable, shown
from pipeline.train.optim import stays_in_evaluation
from pipeline.train.order import keep_generators, seed_all
from pipeline.train.same import attribute_prints, find_differing
from pipeline.wording import first_line, listed

if TYPE_CHECKING:
    from pipeline.train.state import State

_SAMPLES, _TOLERANCE, _TOLERANCE_16_BITS = 5, 1e-3, 5e-2
_KEPT_ELSEWHERE = (
    "changed in training, and checkpoints do not contain the change. A resumed run and `pipeline evaluate` start "
    "without it. If the loss or an output depends on it, their results differ. Keep such state in a buffer "
    "(register_buffer), or give the module get_extra_state and set_extra_state."
)


def check_transformed(s: "State", before: Any, after: Any) -> None:
    """Refuse hooks that change the number of samples of a batch, by which its loss is weighted."""
    key = "hooks" if s.experiment.train.batch_transform is None else "train.batch_transform"
    if after is None:
        raise ExperimentError.of(key, "transform() returned nothing; return the batch")
    try:
        had, has = count_samples(before), count_samples(after)
    except ExperimentError:  # a batch without rows, whose loss has a count
        return
    if had != has:
        raise ExperimentError.of(key, f"transform() returned {has} of {had} samples; return as many samples as it gets")


def check_graph(s: "State", loss: Tensor) -> None:
    """Refuse a loss without a graph, such as a constant for a batch that has no items."""
    if not loss.requires_grad:
        raise ExperimentError.of(
            "loss" if s.experiment.task is None else "task",
            "returned a loss that does not depend on any parameter. Remove a detach() or no_grad(); for a batch "
            "without items, return the outputs' sum times 0",
        )


def check_halves(s: "State") -> None:
    """Warn if the sums of two parts of a few samples don't add up to that of all: the loss is not a mean over samples.

    torch's own losses are known and not looked at. Of a loss that draws random numbers nothing is said. One that fails
    on so few samples is not checked, with a warning. Collective if sharded.
    """
    known = isinstance(s.task, LanguageModel) or (isinstance(s.task, Supervised) and s.task.is_known)
    count = min(_SAMPLES, s.batches.readable)
    is_divided = s.rank.world_size > 1 or s.accumulation > 1
    if known or not is_divided or s.experiment.optimizers or count < 3 or not isinstance(s.trial, Training):
        return
    losses: list[tuple[float, float]] = []
    modes = [(one, one.training) for one in s.trainee.modules()]
    s.trainee.eval()
    try:
        with torch.no_grad(), keep_buffers(s.trainee), keep_generators(), s.autocast():
            batch = s.batches.place(s.batches.read(range(count)))
            parts = [batch, batch, *(part_of(batch, rows, count) for rows in (slice(0, 2), slice(2, count)))]
            gathering.current.begin(s, None, exchange=False)
            for number, part in enumerate(parts):
                seed_all(min(number, 1), s.device)
                found = s.trainee(part)
                losses.append((float(found.sum), 0.0 if found.count is None else float(found.count)))
    except Exception as error:  # user code may raise anything, and so few samples may be too few for it
        if s.is_sharded:  # whose weights are left gathered, so that no step could follow
            error.add_note("This was a check of the loss with five samples.")
            raise
        s.warn(
            f"not checked if the loss is a mean over the samples: with {count} samples it raised {first_line(error)}"
        )
        return
    finally:
        for module, training in modes:
            module.training = training
    (whole, counted), (again, _), *halves = losses
    both, counts = (sum(column) for column in zip(*halves, strict=True))
    tolerance = _TOLERANCE_16_BITS if s.experiment.train.precision in ("bf16", "fp16") else _TOLERANCE
    scale = max(abs(whole), sum(abs(one) for one, _ in halves))
    is_known = abs(whole - again) <= tolerance * scale < float("inf") and abs(both) < float("inf")
    adds_up = abs(both - whole) <= tolerance * scale and abs(counts - counted) <= tolerance * abs(counted)
    if is_known and not adds_up and not gathering.current.is_used:  # else it is of the global batch
        s.warn(
            f"{'task' if s.experiment.task else 'loss'}: it is not a mean over the samples. The parts of {count} "
            f"samples have {both:.6g} in sum, and all of them {whole:.6g}. So training depends on the number of "
            "workers and micro-batches. Return Loss(sum, count), or compare the samples of a global batch with "
            "pipeline.tasks.gathered."
        )


def part_of(batch: Any, rows: slice, samples: int) -> Any:
    """Return some rows of all tensors and lists of a batch that have a row for each sample."""
    if isinstance(batch, Mapping):
        return {name: part_of(one, rows, samples) for name, one in batch.items()}
    if isinstance(batch, tuple) or (isinstance(batch, list) and len(batch) != samples):
        parts = [part_of(one, rows, samples) for one in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    is_divided = isinstance(batch, list) or (isinstance(batch, Tensor) and batch.ndim and len(batch) == samples)
    return batch[rows] if is_divided else batch


def check_log_names(names: Mapping[int, tuple[str, ...]]) -> None:
    """Refuse logs of other names on other ranks."""
    if len({frozenset(own) for own in names.values()}) > 1:
        each = ", ".join(f"{', '.join(own) or 'nothing'} on rank {rank}" for rank, own in names.items())
        raise ExperimentError.of("task", f"Loss.logs has {each}; return the same names for every batch")


def check_losses_given(s: "State", names: Collection[str]) -> None:
    """Refuse a task that has not called update for each of several optimizers."""
    if missing := [name for name in s.experiment.optimizers if name not in names]:
        message = f"gave no loss for optimizers.{missing[0]}; call update for each optimizer, for every batch"
        raise ExperimentError.of("task", message)


def check_trainable(s: "State") -> None:
    """Refuse code that has unfrozen, added or replaced parameters since the start."""
    names = [name for name, one in find_trainable(s.trainee).items() if s.trainable.get(name) is not one]
    if names:
        raise ExperimentError.of(
            "model",
            f"{listed(names)} require a gradient after step {s.step}, but did not when training started, or have been "
            "replaced. The optimizer trains only what requires a gradient at the start. Train in two runs: freeze "
            "the parameters in the first (train.freeze), and start the second from its weights (train.start_from).",
        )


def check_gradient_hooks(trainee: nn.Module, *, micro_batches: int) -> str:
    """Return a warning about hooks on gradients in a step of several micro-batches; call before a strategy wraps."""
    kinds = ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
    parts = (*trainee.named_parameters(), *trainee.named_modules())
    names = [shown(name) for name, one in parts if any(getattr(one, kind, None) for kind in kinds)]
    if not names or micro_batches == 1:
        return ""
    return (
        f"model: gradients of {listed(names)} have hooks, which get the gradient of one of the step's {micro_batches} "
        "micro-batches. If one is not linear, such as clamp, training depends on the number of workers and "
        "micro-batches. Use train.clip_grad_norm, or before_update of a hook (hooks:)."
    )


def find_coupled_buffers(s: "State") -> tuple[str, ...]:
    """Return what depends on how ranks share a global batch: types of layers, random numbers, buffers that differ."""
    names = []
    for module in s.model.modules():
        kind = type(module).__name__.removeprefix("FSDP")
        normalizes = isinstance(module, _BatchNorm) and not stays_in_evaluation(module)
        if normalizes or (isinstance(module, _DropoutNd) and module.p > 0):
            names.append(kind)
        elif isinstance(module, nn.RNNBase) and module.dropout > 0:
            names.append(f"Dropout of {kind}")
    names += [RANDOM_NUMBERS] if s.facts is not None and s.facts.draws else []
    names += [BATCH_TRANSFORM] if s.experiment.train.batch_transform is not None else []
    return (*dict.fromkeys(names), *s.differing_buffers)


class FirstStep:
    """Check of the first step: buffers that it changes, and attributes that checkpoints lack."""

    def __init__(self, s: "State") -> None:
        self._s = s
        self._attributes = attribute_prints(s.trainee) if isinstance(s.trial, Training) else {}
        self._buffers = {name: one.clone() for name, one in _buffers(s)} if s.accumulation > 1 else {}

    def check(self) -> None:
        """Warn of buffers that are of a part of the batch, and of attributes that changed. Collective."""
        s = self._s
        buffers = dict(_buffers(s))
        names = find_differing(buffers, rank=s.rank)
        if names:
            s.differing_buffers = (_format_names(names),)
        changed = [n for n, one in self._buffers.items() if n in buffers and not torch.equal(one, buffers[n])]
        messages = []
        if names or changed:
            messages.append(
                f"model: each part of a batch updates {_format_names(names or changed)}: each worker's, of which only "
                "rank 0's value is saved, and each micro-batch of train.gradient_accumulation. If the loss depends on "
                "it, training differs from training with the whole batch. Compute the update from "
                "pipeline.tasks.gathered(...), once in a step."
            )
        now = attribute_prints(s.trainee) if self._attributes else {}
        saved = tuple(f"{place}." for place, module in s.trainee.named_modules() if _has_extra_state(module))
        before = {name: one for name, one in self._attributes.items() if not name.startswith(saved)}
        if lost := [name for name, one in before.items() if now.get(name) != one]:
            messages.append(f"{listed(lost)} {_KEPT_ELSEWHERE}")
        for message in messages if isinstance(s.trial, Training) else ():
            s.warn(message)


def _has_extra_state(module: nn.Module) -> bool:
    """Return True if a module, or a task that is none, puts more than parameters and buffers into checkpoints."""
    return type(module).get_extra_state is not nn.Module.get_extra_state or (
        isinstance(module, AsModule) and hasattr(module.inner, "state_dict")
    )


def _format_names(names: Sequence[str]) -> str:
    return f"{'buffer' if len(names) == 1 else 'buffers'} {listed([shown(name) for name in names])}"


def _buffers(s: "State") -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers but those of layers that are known by their type.

    Ranks that update them from their own samples have different ones after a step: DDP copies those of rank 0 before
    the next forward pass only.
    """
    for name, module in s.trainee.named_modules():
        if not isinstance(module, _BatchNorm):
            for own, buffer in module.named_buffers(recurse=False):
                yield f"{name}.{own}" if name else own, buffer
