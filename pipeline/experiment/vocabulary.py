"""The dotted keys that an experiment file can have, without importing any component."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from pipeline.errors import PipelineError
from pipeline.experiment import keys, source
from pipeline.experiment.jsonschema import Shape
from pipeline.experiment.schema import Experiment

_TARGET = "_target_"


def all_keys(file: Path | None = None) -> list[str]:
    """Return the dotted keys of all values in the schema, and in a file, whose components have arguments."""
    shape = Shape.of(Experiment)
    described = (keys.child(key, _TARGET) if shape.is_component(keys.split(key)) else key for key in shape.all_keys())
    known = dict.fromkeys([*described, *_keys_of(file)])
    sections = {key for inner in known for key in list(keys.ancestors(inner))[2:]}  # the first two are the key itself
    return [key for key in known if key not in sections]


def _keys_of(file: Path | None) -> list[str]:
    try:
        return list(_leaves(source.read(str(file)).tree, "")) if file is not None else []
    except PipelineError:
        return []


def _leaves(value: object, key: str) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, keys.child(key, str(name)))
    elif key:
        yield key
