"""Parts of the section ``train`` that are off unless they are asked for: compiling, recomputing, averaging."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from pipeline.config.values import NotNegative, Section


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


def _switched(value: object) -> object:
    """Yes is all of the defaults, no is nothing."""
    return {} if value is True else None if value is False else value


def _or_boolean(schema: dict[str, Any]) -> None:
    schema["anyOf"] = [{"type": "boolean"}, *schema["anyOf"]]


SWITCH = BeforeValidator(_switched)
"""For a section that may also be ``true`` or ``false``."""
OR_BOOLEAN = Field(json_schema_extra=_or_boolean)


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
