"""Losses, gradients and weights that are NaN or infinite: which samples cause them, and what training does then."""

import math
import time
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeline.errors import TrainingError
from pipeline.train.ranks import are_finite, gather

if TYPE_CHECKING:
    from pipeline.train.state import State

MOST_IN_A_ROW = 10
HALVINGS = 16  # skipped steps that fp16 may need to find its loss scale, which begins at 2^16
_READING_S = 10.0  # Seconds for which samples are read again, to find a NaN in them
REMEDY = "Try a lower learning rate, train.clip_grad_norm, or train.precision: fp32"


def check_weights(s: "State") -> None:
    """Raise a TrainingError if weights are not finite, before a checkpoint. Collective."""
    weights = [weight.detach() for weight in s.trainee.parameters()]
    weights = [weight for weight in weights if weight.is_floating_point() or weight.is_complex()]
    if not all(gather(are_finite(weights), rank=s.rank)):
        raise TrainingError(
            f"weights are not finite after step {s.step}, although its loss is finite. A gradient was not finite in "
            f"this step or shortly before. {REMEDY}. To skip such steps, set train.on_nonfinite: skip"
        )


class Finiteness:
    """Check of losses and gradient norms at each report. All ranks call all methods alike, with the same sums."""

    def __init__(self, s: "State") -> None:
        self._s = s
        self._skips = s.experiment.train.on_nonfinite == "skip"
        self._is_fp16 = s.experiment.train.precision == "fp16"
        self.skipped: list[int] = []  # Steps skipped since training started or was resumed, counted from 1
        self._in_a_row, self._has_told = 0, False

    def note_skipped(self, step: int) -> None:
        """Note that a step, numbered from 1, was skipped."""
        self._in_a_row = self._in_a_row + 1 if self.skipped[-1:] == [step - 1] else 1
        self.skipped.append(step)

    @property
    def is_exhausted(self) -> bool:
        """True if too many steps in a row were skipped."""
        return self._in_a_row >= MOST_IN_A_ROW + HALVINGS * self._is_fp16

    def judge(self, losses: Sequence[float], *, norms: Sequence[float], own: Tensor, first: int) -> None:
        """Check the losses and gradient norms of steps; ``own`` is this rank's share of each loss. Collective."""
        if self._skips:
            if self.skipped and not self._has_told:
                self._has_told, step = True, self.skipped[0]
                loss = losses[step - first]
                what = "gradients are not finite" if math.isfinite(loss) else f"the loss is {loss}"
                where = self._describe_place(step, own[step - first])
                self._s.warn(f"{what} in {where}. Skipped this step. Later ones are also skipped.")
            if self.is_exhausted:
                steps = self.skipped[-self._in_a_row :]
                raise TrainingError(
                    f"{len(steps)} steps in a row were skipped because a loss or gradient was not finite: "
                    f"{format_some(steps)}. {REMEDY}."
                )
            return
        # fp16 gradients overflow until the scale fits.
        for index, (loss, norm) in enumerate(zip_longest(losses, () if self._is_fp16 else norms, fillvalue=0.0)):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                what = f"gradient norm is {norm}" if math.isfinite(loss) else f"loss is {loss}"
                raise TrainingError(f"the {what} in {self._describe_place(first + index, own[index])}. {REMEDY}")

    def judge_validation(self, loss: float) -> None:
        """Raise a TrainingError if the validation loss is not finite; with ``skip``, warn: the steps were finite."""
        if math.isfinite(loss):
            return
        step, epoch = self._s.step, self._s.epoch_of(self._s.step)
        what = f"the validation loss is {loss} after epoch {epoch} (step {step}), although the weights are finite"
        if not self._skips:
            remedy = f"{REMEDY}. To continue with a warning, set train.on_nonfinite: skip."
            raise TrainingError(f"{what}. Check the validation samples. {remedy}")
        self._s.warn(f"{what}. Training continues because of train.on_nonfinite: skip.", subject="validation loss")

    def summarize(self) -> None:
        """Warn of all skipped steps, at the end of the training."""
        if (count := len(self.skipped)) > 1:
            self._s.warn(
                f"{count} steps were skipped because a loss or gradient was not finite: {format_some(self.skipped)}"
            )

    def _describe_place(self, step: int, own: Tensor) -> str:
        """Return the step, counted from 1, and the samples that may be the cause, as text. Collective."""
        s, batch = self._s, self._s.order.global_batch(step - 1).tolist()
        ranks = gather((s.rank.place, bool(torch.isfinite(own))), rank=s.rank)
        blamed = [rank for rank, (_, is_finite) in enumerate(ranks) if not is_finite]
        where = f"step {step} (epoch {s.epoch_of(step)}); "
        looks = s.rank.rank in blamed or not blamed  # if only a gradient isn't finite, any rank may have the cause
        found = gather(self._find(batch[s.rank.rank :: s.rank.world_size]) if looks else [], rank=s.rank)
        bad = sorted({index for own_found in found for index in own_found})
        inputs = f"; the inputs of sample{'s' * (len(bad) > 1)} {format_some(bad)} contain NaN or inf" if bad else ""
        if s.rank.world_size == 1 or not blamed:
            return f"{where}its global batch is samples {format_some(batch)}{inputs}"
        shares = (f"{ranks[rank][0]}, samples {format_some(batch[rank :: s.rank.world_size])}" for rank in blamed)
        return f"{where}not finite: {', '.join(shares)}{inputs}"

    def _find(self, indices: Sequence[int]) -> list[int]:
        """Read samples again, for some seconds, and return those whose inputs aren't finite."""
        found, since = list[int](), time.monotonic()
        for index in dict.fromkeys(indices) if not self._s.order.is_stream else ():
            try:
                batch = self._s.batches.read([index])
            except Exception:  # noqa: BLE001 - user code, which may need more samples; the error to report is another
                break
            leaves = tree_leaves(batch[0] if isinstance(batch, tuple | list) else batch)
            if any(isinstance(one, Tensor) and not bool(torch.isfinite(one).all()) for one in leaves):
                found.append(index)
            if time.monotonic() - since > _READING_S:
                break
        return found


def format_some(numbers: Sequence[int]) -> str:
    """Return the first eight numbers, and their count if there are more, as text."""
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown} ... ({len(numbers)} in all)"
