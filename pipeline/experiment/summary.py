"""Experiments in other forms: flat parameters for MLflow, a hash, resolved YAML."""

import hashlib
import json
from collections.abc import Mapping

import yaml

from pipeline.experiment import keys, references
from pipeline.experiment.schema import Experiment
from pipeline.experiment.yaml_text import Dumper


def flatten(experiment: Experiment) -> dict[str, str]:
    """Return dotted keys with their values as strings, e.g. {"train.epochs": "3"}; a list of plain values is one."""
    flat: dict[str, str] = {}
    _flatten(_shown(experiment), "", flat)
    return flat


def config_hash(experiment: Experiment) -> str:
    """Return 12 hexadecimal digits (SHA-256) that are equal for equal experiments, however their files are written."""
    canonical = json.dumps(_shown(experiment), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def to_yaml(experiment: Experiment) -> str:
    """Return the experiment with all defaults as YAML; loading it gives the same experiment."""
    plain = experiment.model_dump(mode="json")
    if experiment.train.batch_size_per_worker is not None:
        del plain["train"]["global_batch_size"]  # that follows from it
    return yaml.dump(plain, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def _shown(experiment: Experiment) -> dict[str, object]:
    return references.fill_in(experiment, mode="show").model_dump(mode="json")


def _flatten(value: object, key: str, into: dict[str, str]) -> None:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            _flatten(inner, keys.child(key, name), into)
    elif isinstance(value, list) and any(isinstance(inner, Mapping | list) for inner in value):
        for index, inner in enumerate(value):
            _flatten(inner, keys.child(key, index), into)
    else:
        into[key] = value if isinstance(value, str) else json.dumps(value)
