"""YAML dialect of experiment files: PyYAML's, without its readings that most people don't expect.

PyYAML reads YAML 1.1. Here 1e-3 is a number, and a date or a time such as 10:30 is a string. Values such as 010 and no,
which YAML 1.2 reads differently, are rejected by `pipeline.experiment.lines`.
"""

import math
import re

import yaml

_EXPONENT = re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
_FLOAT = "tag:yaml.org,2002:float"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_STRING = "tag:yaml.org,2002:str"
_TIME = re.compile(r"^[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?$")
_ONLY_1_1 = re.compile(r"[-+]?0[0-7_]+|[-+]?0b[01_]+|[-+.]?[0-9].*_.*|yes|no|on|off", re.IGNORECASE)


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    known = yaml.SafeLoader.yaml_implicit_resolvers
    ours = {first: [entry for entry in entries if entry[0] != _TIMESTAMP] for first, entries in known.items()}
    for first in "-+0123456789":
        ours.setdefault(first, []).append((_FLOAT, _EXPONENT))
    return ours


class Loader(yaml.SafeLoader):
    """Loader of experiment files and of override values."""

    yaml_implicit_resolvers = _resolvers()


for _first in "-+0123456789":
    Loader.yaml_implicit_resolvers[_first].insert(0, (_STRING, _TIME))


class Dumper(yaml.SafeDumper):
    """Dumper whose output `Loader` reads back unchanged."""

    yaml_implicit_resolvers = _resolvers()

    def ignore_aliases(self, data: object) -> bool:
        """Write repeated values in full instead of as aliases, for readability."""
        return True


def is_ambiguous(node: yaml.ScalarNode) -> bool:
    """Return True if a value without quotes is a number or boolean in YAML 1.1, and something else in YAML 1.2."""
    return node.style is None and node.tag != _STRING and _ONLY_1_1.fullmatch(node.value) is not None


def written(value: object) -> str:
    """Return a value as one line of YAML."""
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)  # 1e-06; PyYAML writes 1.0e-06
    text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, allow_unicode=True, width=math.inf)
    return text.removesuffix("\n").removesuffix("\n...")
