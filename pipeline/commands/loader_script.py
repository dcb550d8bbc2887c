"""``load.py`` of an exported model: a script of a few lines that loads it without this project."""

from collections.abc import Mapping, Sequence

_SAFETENSORS = """\
import json
import os
import random
import re
from pathlib import Path
from pkgutil import resolve_name

import numpy
import torch
from safetensors.torch import load_file

FOLDER = Path(__file__).parent


def build(value):
    if isinstance(value, dict):
        arguments = {name: build(inner) for name, inner in value.items() if name != "_target_"}
        if "_target_" not in value:
            return arguments
        home, _, name = value["_target_"].rpartition(".")
        return getattr(resolve_name(home), name)(**arguments)
    if isinstance(value, str):  # environment variables are not stored; set those that are named here
        return re.sub(r"\\${oc\\.env:([^,}]+)[^}]*}", lambda found: os.environ[found[1]], value)
    return [build(inner) for inner in value] if isinstance(value, list) else value


# The constructor draws the numbers of the training, and leaves no trace in the generators.
states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
random.seed(SEED)
numpy.random.seed(SEED % 2**32)
torch.default_generator.manual_seed(SEED)
model = build(json.loads((FOLDER / "model.json").read_text())["model"])CAST
random.setstate(states[0])
numpy.random.set_state(states[1])
torch.set_rng_state(states[2])
model.load_state_dict(load_file(FOLDER / "model.safetensors"))
model.eval()
"""
_TORCH_EXPORT = """\
from pathlib import Path

import torch

model = torch.export.load(Path(__file__).parent / "model.pt2").module()
"""
_ONNX = """\
from pathlib import Path

import onnxruntime

session = onnxruntime.InferenceSession(Path(__file__).parent / "model.onnx")


def model(inputs):
    return session.run(None, {"inputs": inputs})[0]
"""
_BODIES = {"safetensors": _SAFETENSORS, "torch-export": _TORCH_EXPORT, "onnx": _ONNX}


def loader_script(
    form: str,
    *,
    origin: str,
    target: str,
    is_double: bool,
    inputs: Mapping[str, tuple[Sequence[int], str]],
    seed: int = 0,
) -> str:
    """Return the text of the script.

    Args:
        form: format of the model.
        origin: run and weights in words, for the docstring.
        target: class or function that builds the model.
        is_double: True for weights in fp64.
        inputs: shape of a batch, and its type, e.g. "float32", by name; "" is a single tensor, empty if unknown.
        seed: seed of the random numbers that the model's constructor draws.
    """
    body = _BODIES[form].replace("CAST", ".double()" if is_double else "").replace("SEED", str(seed))
    opening = f'"""{target}, written by pipeline export: `from load import model`.\n\n{origin}.\n"""\n'
    return f"{opening}\n{_needs(form, target)}{body}{_call(form, inputs=inputs)}"


def _needs(form: str, target: str) -> str:
    """Return the comment on what loading the model needs."""
    if form != "safetensors":
        return f"# Needs {'torch' if form == 'torch-export' else 'onnxruntime'} only, and no class of the model.\n"
    if target.startswith("pipeline."):
        return (
            f"# Needs torch, safetensors and {target}, which is ddp-pipeline's own.\n"
            "# pipeline export --format torch-export writes a model that needs no class.\n"
        )
    return f"# Needs torch, safetensors and {target}, and not ddp-pipeline.\n"


def _call(form: str, *, inputs: Mapping[str, tuple[Sequence[int], str]]) -> str:
    """Return the lines that call the model with zeros if the script is run."""
    if not inputs:
        return ""
    module = "numpy" if form == "onnx" else "torch"
    zeros = {name: f"{module}.zeros({tuple(shape)}, dtype={module}.{dtype})" for name, (shape, dtype) in inputs.items()}
    given = ", ".join(f"{name}={value}" if name else value for name, value in zeros.items())
    imported = "" if form == "torch-export" else f"    import {module}\n\n"
    return f'\nif __name__ == "__main__":\n{imported}    print(model({given}))\n'
