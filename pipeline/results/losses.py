"""Comparison of the losses of two trials in their first steps, and what explains a difference."""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from pipeline.protocol.trial import Trial
from pipeline.protocol.trial_result import BATCH_TRANSFORM, RANDOM_NUMBERS, TrialResult
from pipeline.results import texts
from pipeline.wording import figure

TOLERANCE: Mapping[str, float] = {"fp64": 1e-9, "fp32": 1e-3, "tf32": 1e-2, "bf16": 5e-2, "fp16": 5e-2}
"""Largest difference of two loss series of the same training, by precision: sums in another order round differently.

TF32 rounds factors to 10 bits, and batches of other sizes take other kernels. Relative to the loss where the loss is
larger than 1.
"""
FIRST_STEPS = 3
"""Steps whose losses decide if two trainings are the same.

Training amplifies rounding, by a factor of 100 per step with batch norm and a high learning rate, so equal trainings
may drift apart later. The loss of the first step depends on the forward pass, the following losses on gradients and
optimizer.
"""


class LossCheck(NamedTuple):
    """Comparison of a trial's losses with the baseline's."""

    first: float  # Largest difference within the first `FIRST_STEPS` steps
    largest: float  # Largest difference in all steps that both have
    tolerance: float  # Difference that rounding explains
    reason: str  # Layers and options that explain another loss on the same batches; empty if none does

    @property
    def state(self) -> Literal["same", "drifts", "explained", "differs"]:
        """Agreement: in all steps, in the first steps, not but for a known reason, or not without a reason."""
        if self.largest <= self.tolerance:
            return "same"
        return "drifts" if self.first <= self.tolerance else "explained" if self.reason else "differs"

    @property
    def sentence(self) -> str:
        """Sentence on how the losses differ, and why; empty if they do not."""
        is_finite = math.isfinite(self.largest if self.state == "drifts" else self.first)
        return texts.LOSSES[self.state, is_finite].format(
            steps=FIRST_STEPS,
            first=figure(self.first, digits=2),
            largest=figure(self.largest, digits=2),
            reason=self.reason,
            tolerance=figure(self.tolerance),
        )


def check_losses(trial: Trial, result: TrialResult, base_trial: Trial, base: TrialResult) -> LossCheck | None:
    """Compare the losses of a trial with the baseline's; None with other global batches, or without losses."""
    own_size, base_size = (one.experiment.train.global_batch_size for one in (trial, base_trial))
    pairs = [*zip(result.losses, base.losses, strict=False)]  # training that ended early has fewer
    if own_size != base_size or not pairs:
        return None
    differences = [abs(own - other) / max(1.0, abs(other)) for own, other in pairs]
    differences = [math.inf if math.isnan(difference) else difference for difference in differences]
    precision = trial.experiment.train.precision
    is_tf32 = precision == "fp32" and result.flops is not None and "tf32" in result.flops.of_sample
    return LossCheck(
        first=max(differences[:FIRST_STEPS]),
        largest=max(differences),
        tolerance=TOLERANCE["tf32" if is_tf32 else precision],
        reason=_explain(trial, result, base_trial, base),
    )


def find_statistics(result: TrialResult) -> list[str]:
    """Return the layers of a trial's model that compute with statistics of their batch."""
    others = (RANDOM_NUMBERS, BATCH_TRANSFORM)
    return [kind for kind in result.coupling if kind not in others and "Dropout" not in kind]


def describe_statistics(kind: str) -> str:
    """Say of batch statistics, or of buffers by name, that each worker computes them from its part of the batch."""
    if kind.startswith("buffer"):
        return f"the {kind} {'are' if kind.startswith('buffers') else 'is'} computed separately on each worker"
    return f"{kind} computes its statistics separately on each worker"


def _explain(trial: Trial, result: TrialResult, base_trial: Trial, base: TrialResult) -> str:
    """Return the layers and options that explain different losses on the same batches; empty if none does."""
    if max(trial.replicas, base_trial.replicas) < 2:
        return ""
    masks = [kind for kind in result.coupling if "Dropout" in kind]
    statistics = find_statistics(result)
    reasons = [describe_statistics(kind) for kind in statistics]
    if statistics and base.micro_batches is not None:
        reasons = [describe_statistics(kind) for kind in statistics if kind != "SyncBatchNorm"]
        reasons.append(f"the baseline computes the statistics of each of its {base.micro_batches} micro-batches")
    reasons += [f"{kind} draws a different mask on each worker" for kind in masks]
    if RANDOM_NUMBERS in result.coupling and not masks:
        reasons.append(f"each worker draws different {RANDOM_NUMBERS}")
    if BATCH_TRANSFORM in result.coupling:
        reasons.append(f"{BATCH_TRANSFORM} mixes the samples of each worker separately")
    if (hook := trial.options.get("communication_hook", "none")) != "none":
        reasons.append(f"communication_hook: {hook} rounds the gradients")
    return ", ".join(reasons)
