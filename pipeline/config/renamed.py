"""Keys of an experiment and numbers of a report by their names of earlier versions, and what they are called now.

A user's file with an old name is rejected, and ``pipeline check --fix`` rewrites it. A recorded run is translated.
"""

import re
from collections.abc import Mapping
from typing import Any

KEYS: Mapping[str, str] = {
    "order": "sampler",
    "compare": "benchmark",
    "measure": "benchmark",
    "measure.pairs": "benchmark.rounds",
    "measure.budget_s": "benchmark.time_budget_s",
    "measure.interval": "benchmark.confidence_level",
    "parallel.interface": "parallel.network_interface",
    "tracking.also": "tracking.loggers",
    "tracking.trackers": "tracking.loggers",
}
"""New key by old key."""
NUMBERS: Mapping[str, str] = {
    "speedup_low": "speedup_ci_low",
    "speedup_high": "speedup_ci_high",
    "speedup_pairs": "speedup_rounds",
}
"""New name of a number by its old name, in recorded reports and journals."""
_ENTRY = re.compile(r"compare\[?\.?(\d+)\]?(?=\.|$)")
_SECTION = re.compile(r"[.\[]")


def translate_key(key: str) -> str:
    """Return the key that a dotted key of an earlier version has now; keys without another name stay.

    The first entry of ``compare`` was the baseline.
    """
    if entry := _ENTRY.match(key):
        number, rest = int(entry[1]), key[entry.end() :]
        return f"benchmark.configurations[{number - 1}]{rest}" if number else f"benchmark.baseline{rest}"
    for old in sorted(KEYS, key=len, reverse=True):
        if key == old or (key.startswith(old) and _SECTION.match(key, len(old))):
            return KEYS[old] + key[len(old) :]
    return key


def translate(tree: dict[str, Any]) -> None:
    """Give the keys of an experiment of an earlier version their new names, in place."""
    entries, measure = tree.pop("compare", None), tree.pop("measure", None)
    if isinstance(entries, list) and entries:
        benchmark = tree.setdefault("benchmark", {})
        benchmark["baseline"], configurations = entries[0], entries[1:]
        if configurations:
            benchmark["configurations"] = configurations
    if isinstance(measure, Mapping):
        tree.setdefault("benchmark", {}).update(_rename_keys(measure, "measure"))
    for section in ("parallel", "tracking"):
        if isinstance(tree.get(section), Mapping):
            tree[section] = _rename_keys(tree[section], section)
    if "order" in tree:
        tree["sampler"] = tree.pop("order")
    sweep = tree.get("sweep")
    if isinstance(sweep, Mapping) and isinstance(sweep.get("parameters"), Mapping):
        parameters = {translate_key(name): values for name, values in sweep["parameters"].items()}
        tree["sweep"] = {**sweep, "parameters": parameters}


def translate_params(params: Mapping[str, str]) -> dict[str, str]:
    """Return flat parameters of a run, by dotted key, with today's keys."""
    return {translate_key(key): value for key, value in params.items()}


def _rename_keys(section: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a section with the new names of its keys; lists that share a name are joined."""
    result: dict[str, Any] = {}
    for key, value in section.items():
        new = translate_key(f"{name}.{key}").rpartition(".")[2]
        result[new] = [*result[new], *value] if new in result and isinstance(value, list) else value
    return result
