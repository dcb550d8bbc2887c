"""Parts of the section ``train`` that are off unless they are asked for: compiling, recomputing, averaging."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from pipeline.config.values import OR_BOOLEAN, SWITCH, NotNegative, Positive, PositiveFloat, Section


class Compile(Section):
    """torch.compile (Ansel et al. 2024, "PyTorch 2", doi 10.1145/3620665.3640366); names as torch has them."""

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """reduce-overhead replays CUDA graphs, for models whose kernels are short; max-autotune also tries out kernels."""
    dynamic: bool = False
    """Compile once for inputs of all sizes; otherwise for each size, of which a training has few."""
    fullgraph: bool = False
    """Refuse a model of which a part can't be compiled, instead of leaving that part as it is."""


class Ema(Section):
    """Exponential moving average of the weights (Polyak and Juditsky 1992, doi 10.1137/0330046, averaged them first).

    The averages are what is evaluated and what the trained model consists of.
    """

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """After each step the average is decay * average + (1 - decay) * weight."""
    start_step: NotNegative = 0
    """Steps until averaging begins; the averages are the weights until then."""


Patterns = bool | str | tuple[str, ...]
"""Names of modules; ``*`` stands for any part between two dots. true: the blocks that the model repeats."""


class LearningRateScaling(Section):
    """How the learning rate follows the global batch size (Goyal et al. 2017, arXiv 1706.02677, for ``linear``)."""

    rule: Literal["none", "linear", "sqrt"] = "none"
    """Factor on the optimizer's lr, or on the lr of OneCycleLR and CyclicLR: 1, global/base, or its square root."""
    base_batch_size: Positive = 256
    """The global batch size that the optimizer's ``lr`` was chosen for."""
    warmup_steps: NotNegative = 0
    """Steps over which the learning rate rises linearly from the unscaled to the scaled value."""


class Train(Section):
    """How long and how to train."""

    epochs: Positive
    """Passes over the training set."""
    global_batch_size: Positive
    """Samples in one optimizer step, over all workers. It never depends on the number of workers."""
    gradient_accumulation: Positive = 1
    """Micro-batches of each worker's share of a global batch; evaluation has batches of their size."""
    precision: Literal["fp32", "fp64", "bf16", "fp16"] = "fp32"
    """bf16 and fp16 use autocast; fp64 is for proofs that two runs train the same."""
    memory_format: Literal["contiguous", "channels_last"] = "contiguous"
    """How image batches (four dimensions) and convolutions lie in memory; channels_last is what tensor cores read."""
    clip_grad_norm: PositiveFloat | None = None
    """Clip the global gradient norm to this value."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """When a loss or gradient is NaN or infinite: stop; skip that step; or go back to the newest checkpoint and leave
    out that step's global batch, three times at most. A validation loss that isn't finite ends training before the
    checkpoint of its epoch; with skip it is told."""
    scheduler_interval: Literal["step", "epoch"] = "step"
    """When the scheduler advances: after each step, whether it was taken, skipped, or overflowed in fp16; or after each
    epoch."""
    lr_scaling: LearningRateScaling = LearningRateScaling()
    """Learning-rate scaling with the global batch size."""
    log_every_steps: Positive = 10
    """Steps between two reports, or more if they take less than 0.1 s; every step's loss is in the report."""
    evaluate_every_epochs: Positive = 1
    """Epochs between two evaluations; the last epoch is always evaluated."""
    compile: Annotated[Compile | None, SWITCH, OR_BOOLEAN] = None
    """torch.compile: true, or how; the time that it takes is reported and in no measurement."""
    activation_checkpointing: Patterns = False
    """Names of modules, such as layer1 or blocks.*, that forget their activations and compute them again in the
    backward pass: less memory, more time, the same losses; true: the blocks that the model repeats."""
    ema: Annotated[Ema | None, SWITCH, OR_BOOLEAN] = None
    """Exponential moving average of the weights, which is evaluated and logged in place of them: true, or how."""

    @property
    def extras(self) -> tuple[str, ...]:
        """What of these is on, in words."""
        return tuple(in_words(how=self.compile, recomputed=self.activation_checkpointing, ema=self.ema))


def in_words(*, how: Compile | None, recomputed: Patterns, ema: Ema | None) -> Iterator[str]:
    """What is on, e.g. "torch.compile (default)"."""
    if how is not None:
        yield f"torch.compile ({', '.join([how.mode, *_flags(how)])})"
    if recomputed:
        names = (recomputed,) if isinstance(recomputed, str) else recomputed
        yield f"activation checkpointing of {'the repeated blocks' if names is True else ', '.join(names or ())}"
    if ema is not None:
        start = f" from step {ema.start_step} on" if ema.start_step else ""
        yield f"EMA of the weights (decay {ema.decay:g}{start}), which is what is evaluated and logged as the model"


def _flags(how: Compile) -> Iterator[str]:
    if how.dynamic:
        yield "dynamic"
    if how.fullgraph:
        yield "fullgraph"
