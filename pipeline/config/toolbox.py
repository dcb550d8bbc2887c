"""Parts of the section ``train`` that are off unless they are asked for: compiling, recomputing, averaging."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from pipeline.config.values import Frozen, NotNegative


class Compile(Frozen):
    """torch.compile (Ansel et al. 2024, "PyTorch 2", doi 10.1145/3620665.3640366); names as torch has them."""

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """reduce-overhead replays CUDA graphs, for models whose kernels are short; max-autotune also tries out kernels."""
    dynamic: bool = False
    """Compile once for inputs of all sizes; otherwise for each size, of which a training has few."""
    fullgraph: bool = False
    """Refuse a model of which a part can't be compiled, instead of leaving that part as it is."""


class Ema(Frozen):
    """Exponential moving average of the weights (Polyak and Juditsky 1992, doi 10.1137/0330046, averaged them first).

    The averages are what is evaluated and what the trained model consists of.
    """

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """After each step the average is decay * average + (1 - decay) * weight."""
    start_step: NotNegative = 0
    """Steps until averaging begins; the averages are the weights until then."""


Patterns = bool | str | tuple[str, ...]
"""Names of modules; ``*`` stands for any part between two dots. true: the blocks that the model repeats."""


def compiling(compile_: bool | Compile) -> Compile | None:
    """How to compile; None: not at all."""
    return compile_ if isinstance(compile_, Compile) else Compile() if compile_ else None


def averaging(ema: bool | Ema) -> Ema | None:
    """How to average; None: not at all."""
    return ema if isinstance(ema, Ema) else Ema() if ema else None


def in_words(*, compile_: bool | Compile, recomputed: Patterns, ema: bool | Ema) -> Iterator[str]:
    """What is on, e.g. "torch.compile (default)"."""
    if (how := compiling(compile_)) is not None:
        yield f"torch.compile ({', '.join([how.mode, *_flags(how)])})"
    if recomputed:
        names = (recomputed,) if isinstance(recomputed, str) else recomputed
        yield f"activation checkpointing of {'the repeated blocks' if names is True else ', '.join(names or ())}"
    if (average := averaging(ema)) is not None:
        start = f" from step {average.start_step} on" if average.start_step else ""
        yield f"EMA of the weights (decay {average.decay:g}{start}), which is what is evaluated and logged as the model"


def _flags(how: Compile) -> Iterator[str]:
    if how.dynamic:
        yield "dynamic"
    if how.fullgraph:
        yield "fullgraph"
