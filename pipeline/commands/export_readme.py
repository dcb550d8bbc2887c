"""``README.md`` of an exported model: a few lines of Python that load the program and the weights."""

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

_TARGET = "_target_"
_PROGRAM = """
`model.pt2` is a program for batches of any size. It needs torch, and no class of the model:

```python
import torch

program = torch.export.load("model.pt2").module()
outputs = program(INPUTS)
```
"""
_WEIGHTS = """
`model.safetensors` has the weights. They need the code of the model, which may draw random numbers:

```python
import IMPORTS
from safetensors.torch import load_file

seed = SEED
random.seed(seed), numpy.random.seed(seed % 2**32), torch.manual_seed(seed)
model = MODEL
model.load_state_dict(load_file("model.safetensors"))
model.eval()
```
"""


def format_readme(
    model: Mapping[str, Any],
    *,
    origin: str,
    inputs: Mapping[str, tuple[Sequence[int], str]],
    no_program: str,
    is_double: bool,
    seed: int,
) -> str:
    """Return the text of the README.

    Args:
        model: component that builds the model; it was built in this process.
        origin: run and weights in words.
        inputs: shape of a batch, and its type, e.g. "float32", by name; "" is a single tensor.
        no_program: reason why there is no program; empty if there is one.
        is_double: True for weights in fp64.
        seed: seed of the random numbers that the model's constructor draws.
    """
    program = f"\nThere is no program: {no_program}.\n" if no_program else _PROGRAM.replace("INPUTS", _zeros(inputs))
    modules = {"numpy", "random", "torch"}
    built = _expression(model, modules) + ".double()" * is_double
    filled = {"IMPORTS": ", ".join(sorted(modules)), "SEED": str(seed), "MODEL": built}
    weights = re.sub("|".join(filled), lambda found: filled[found[0]], _WEIGHTS)
    return f"# {model[_TARGET]}\n\nFrom {origin}.\n{program}{weights}"


def _zeros(inputs: Mapping[str, tuple[Sequence[int], str]]) -> str:
    zeros = {name: f"torch.zeros({tuple(shape)}, dtype=torch.{dtype})" for name, (shape, dtype) in inputs.items()}
    return ", ".join(f"{name}={value}" if name else value for name, value in zeros.items())


def _expression(value: Any, modules: set[str]) -> str:
    """Return Python for a value of the experiment, where a component is a call; add the modules that it needs."""
    if isinstance(value, Mapping):
        given = {name: _expression(inner, modules) for name, inner in value.items() if name != _TARGET}
        if _TARGET not in value:
            return f"{{{', '.join(f'{name!r}: {one}' for name, one in given.items())}}}"
        modules.add(_module_of(value[_TARGET]))
        return f"{value[_TARGET]}({', '.join(f'{name}={one}' for name, one in given.items())})"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(_expression(inner, modules) for inner in value)}]"
    return repr(value)


def _module_of(target: str) -> str:
    """Return the module in which a component is looked up, e.g. ``lab`` of ``lab.Net.from_file``."""
    parents = target.split(".")[:-1]
    names = (".".join(parents[:count]) for count in range(len(parents), 0, -1))
    return next((name for name in names if name in sys.modules), ".".join(parents))
