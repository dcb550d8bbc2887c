"""Values that are only known once the data is loaded: ``${total_steps}`` and its like.

In an `Experiment` they stand as they do in the file, so that its YAML can be read again. A worker puts the numbers in
when it builds a component.
"""

import re
from collections.abc import Mapping

from pipeline.errors import ExperimentError

RUNTIME_VALUES = ("total_steps", "steps_per_epoch", "world_size")
"""Optimizer steps of the whole training; steps of an epoch; processes."""

NEEDS_DATA = ("total_steps", "steps_per_epoch")
"""Those that the data itself can't use."""

_MARKER = re.compile(r"\$\{(" + "|".join(RUNTIME_VALUES) + r")\}")


def marker(name: str) -> str:
    """The text that stands for a run-time value."""
    return f"${{{name}}}"


def named_in(text: str) -> tuple[str, ...]:
    """Names of the run-time values in a text."""
    return tuple(_MARKER.findall(text))


def substitute(text: str, values: Mapping[str, int], *, key: str) -> str | int:
    """The text with numbers for its markers; the number itself where the marker is the whole text.

    Raises:
        ExperimentError: a value isn't known yet.
    """
    for name in named_in(text):
        if name not in values:
            raise ExperimentError.of(key, f"{marker(name)} is not known yet when this is built; write a number")
    if whole := _MARKER.fullmatch(text):
        return values[whole[1]]
    return _MARKER.sub(lambda found: str(values[found[1]]), text)
