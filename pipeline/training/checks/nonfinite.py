"""Losses, gradients and weights that are NaN or infinite: which samples cause them, and what training does then."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import TrainingError
from pipeline.protocol.events import Outbox, Warned
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Trial
from pipeline.training.batches.order import SampleOrder
from pipeline.training.context import TrainContext
from pipeline.training.ranks.collectives import gather
from pipeline.training.ranks.norms import are_finite

MOST_IN_A_ROW = 10
HALVINGS = 16
"""Skipped steps that fp16 may need to find its loss scale, which begins at 2^16."""
REMEDY = "Try a lower learning rate, train.clip_grad_norm, or train.precision: fp32"


def check_weights(context: TrainContext, *, step: int) -> None:
    """Refuse weights that are not finite, before a checkpoint after ``step`` steps. Collective.

    Raises:
        TrainingError: a weight is not finite, though the losses so far were.
    """
    weights = [weight.detach() for weight in context.whole.parameters()]
    weights = [weight for weight in weights if weight.is_floating_point() or weight.is_complex()]
    if not all(gather(are_finite(weights), rank=context.rank)):
        raise TrainingError(
            f"weights are not finite after step {step}, although its loss is finite. A gradient was not finite in this "
            f"step or shortly before. {REMEDY}. To skip such steps, set train.on_nonfinite: skip"
        )


@dataclass(kw_only=True)
class Finiteness:
    """Check of losses and gradient norms at each report. All ranks call all methods alike, with the same sums."""

    trial: Trial
    rank: Rank
    order: SampleOrder
    outbox: Outbox
    skipped: list[int] = field(default_factory=list)
    """Steps skipped since training started or was resumed, counted from 1."""
    unmeasured: list[int] = field(default_factory=list)
    """Epochs whose validation loss was not finite, counted from 1."""
    _in_a_row: int = 0
    _has_told: bool = False

    def note_skipped(self, step: int) -> None:
        """Note that a step, numbered from 1, was skipped."""
        self._in_a_row = self._in_a_row + 1 if self.skipped[-1:] == [step - 1] else 1
        self.skipped.append(step)

    @property
    def is_exhausted(self) -> bool:
        """True if too many steps in a row were skipped."""
        return self._in_a_row >= MOST_IN_A_ROW + HALVINGS * (self.trial.experiment.train.precision == "fp16")

    def judge(self, losses: Sequence[float], *, norms: Sequence[float], own: Tensor, first: int) -> None:
        """Check the losses and gradient norms (none if unknown) of all steps from ``first`` on, counted from 1.

        ``own`` is this rank's share of each loss, shape (steps,). Collective.

        Raises:
            TrainingError: a value is not finite and its step may not be skipped, or too many steps were skipped.
        """
        if self.trial.experiment.train.on_nonfinite == "skip":
            if self.skipped and not self._has_told:
                self._tell_first(losses, own=own, first=first)
            if self.is_exhausted:
                steps = self.skipped[-self._in_a_row :]
                raise TrainingError(
                    f"{len(steps)} steps in a row were skipped because a loss or gradient was not finite: "
                    f"{some(steps)}. {REMEDY}."
                )
            return
        if self.trial.experiment.train.precision == "fp16":
            norms = ()  # fp16 gradients overflow until the scale fits
        for index, (loss, norm) in enumerate(zip_longest(losses, norms, fillvalue=0.0)):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                what = f"gradient norm is {norm}" if math.isfinite(loss) else f"loss is {loss}"
                where = self._where(first + index, own[index])
                raise TrainingError(f"the {what} in {where}. {REMEDY}")

    def judge_validation(self, loss: float, *, step: int, epoch: int) -> None:
        """Check the validation loss after ``step`` steps; the weights are finite, the loss is equal on all ranks.

        With ``skip`` training continues, since its steps were finite.

        Raises:
            TrainingError: it is not finite.
        """
        if math.isfinite(loss):
            return
        what = f"the validation loss is {loss} after epoch {epoch} (step {step}), although the weights are finite"
        if self.trial.experiment.train.on_nonfinite == "skip":
            self.unmeasured.append(epoch)
            if len(self.unmeasured) == 1:
                self._warn(f"{what}. Training continues because of train.on_nonfinite: skip.")
            return
        raise TrainingError(
            f"{what}. Check the validation samples. {REMEDY}. To continue with a warning, set train.on_nonfinite: skip."
        )

    def summarize(self) -> None:
        """Warn of all skipped steps and evaluations, at the end of the training."""
        if len(self.unmeasured) > 1:
            self._warn(
                f"the validation loss was not finite after {len(self.unmeasured)} epochs: {some(self.unmeasured)}"
            )
        if len(self.skipped) > 1:
            steps = some(self.skipped)
            self._warn(f"{len(self.skipped)} steps were skipped because a loss or gradient was not finite: {steps}")

    def _tell_first(self, losses: Sequence[float], *, own: Tensor, first: int) -> None:
        self._has_told, step = True, self.skipped[0]
        loss = losses[step - first]
        what = "gradients are not finite" if math.isfinite(loss) else f"the loss is {loss}"
        self._warn(f"{what} in {self._where(step, own[step - first])}. Skipped this step. Later ones are also skipped.")

    def _where(self, step: int, share: Tensor) -> str:
        """Return the step and the samples that may be the cause, as text. Collective."""
        epoch, index = divmod(step - 1, self.order.steps_per_epoch)
        batch = self.order.global_batch(epoch, index)
        ranks = gather((self.rank.place, bool(torch.isfinite(share))), rank=self.rank)
        blamed = [(rank, place) for rank, (place, is_finite) in enumerate(ranks) if not is_finite]
        where = f"step {step} (epoch {epoch + 1}); "
        if self.rank.world_size == 1 or not blamed:
            return f"{where}its global batch is samples {some(batch)}"
        shares = (f"{place}, samples {some(self._share(batch, rank))}" for rank, place in blamed)
        return f"{where}not finite: {', '.join(shares)}"

    def _share(self, batch: Sequence[int], rank: int) -> list[int]:
        share: list[int] = self.order.share(np.array(batch), rank=rank, world_size=self.rank.world_size).tolist()
        return share

    def _warn(self, message: str) -> None:
        if self.rank.is_first:
            self.outbox.event(Warned(trial=self.trial.name, message=message))


def some(numbers: Sequence[int]) -> str:
    """Return the first eight numbers, and their count if there are more, as text."""
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown} ... ({len(numbers)} in all)"
