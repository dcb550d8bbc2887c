"""YAML dialect of experiment files: PyYAML's, except that 1e-3 is a number and a date is a string."""

import math
import re

import yaml

_EXPONENT = re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
_FLOAT = "tag:yaml.org,2002:float"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    known = yaml.SafeLoader.yaml_implicit_resolvers
    ours = {first: [entry for entry in entries if entry[0] != _TIMESTAMP] for first, entries in known.items()}
    for first in "-+0123456789":
        ours.setdefault(first, []).append((_FLOAT, _EXPONENT))
    return ours


class Loader(yaml.SafeLoader):
    """Loader of experiment files and of override values."""

    yaml_implicit_resolvers = _resolvers()


class Dumper(yaml.SafeDumper):
    """Dumper whose output `Loader` reads back unchanged."""

    yaml_implicit_resolvers = _resolvers()

    def ignore_aliases(self, data: object) -> bool:
        """Write repeated values in full instead of as aliases, for readability."""
        return True


def written(value: object) -> str:
    """Return a value as one line of YAML."""
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)  # 1e-06; PyYAML writes 1.0e-06
    text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, allow_unicode=True, width=math.inf)
    return text.removesuffix("\n").removesuffix("\n...")
