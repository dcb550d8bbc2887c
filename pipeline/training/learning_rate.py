"""How the learning rate follows the global batch size, and warms up."""

import math

from pipeline.config.schema import LearningRateScaling


def scaling_factor(scaling: LearningRateScaling, *, global_batch_size: int) -> float:
    """Factor on the learning rate for that global batch size."""
    ratio = global_batch_size / scaling.base_batch_size
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[scaling.rule]


def warmup_factor(scaling: LearningRateScaling, *, step: int, global_batch_size: int) -> float:
    """Factor on the scheduled learning rate in that step, counted from 0.

    It rises linearly to 1 over the warm-up: from the unscaled learning rate ("gradual warm-up", Goyal et al. 2017,
    arXiv 1706.02677), or from zero where no rule scales it.
    """
    if step >= scaling.warmup_steps:
        return 1.0
    start = 0.0 if scaling.rule == "none" else 1 / scaling_factor(scaling, global_batch_size=global_batch_size)
    return start + (1 - start) * (step + 1) / (scaling.warmup_steps + 1)
