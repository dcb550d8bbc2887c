"""Releases of Python, torch, Ray, MLflow and pydantic that the tests have passed with, and a warning about others."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import pydantic

from pipeline.cluster.node_facts import NodeFacts
from pipeline.commands.doctor.check_result import CheckResult
from pipeline.config.values import Frozen
from pipeline.system.releases import release

RESULTS = Path(__file__).with_name("tested.json")
"""Results of ``make test-versions``, which writes it, by name of the environment."""
PACKAGES = ("Python", "torch", "ray", "mlflow", "pydantic")


class Environment(Frozen):
    """Result of the tests in one environment."""

    date: str
    versions: Mapping[str, str] = {}
    """Versions of Python and this project's dependencies."""
    tests: Mapping[str, str] = {}
    """Counts, such as "9 passed", by folder or file."""
    failed: tuple[str, ...] = ()
    """Names of the tests that failed."""
    not_run: str = ""
    """Reason why there is no such environment."""

    @property
    def is_passed(self) -> bool:
        """True if tests ran and none failed."""
        return bool(self.tests) and not self.failed


def results() -> dict[str, Environment]:
    """Return the results of all environments that were tried."""
    return {name: Environment.model_validate(found) for name, found in json.loads(RESULTS.read_text()).items()}


def ranges(environments: Iterable[Environment]) -> dict[str, tuple[str, str]]:
    """Return the oldest and newest version of each package, among environments in which all tests passed."""
    passed = [environment.versions for environment in environments if environment.is_passed]
    ordered = {package: sorted((each[package] for each in passed), key=release) for package in PACKAGES}
    return {package: (versions[0], versions[-1]) for package, versions in ordered.items() if versions}


def check_tested_versions(here: NodeFacts, tested: Mapping[str, tuple[str, str]]) -> CheckResult | None:
    """Warn in one sentence if this machine has releases older or newer than all of ``tested``, by package."""
    own = here.versions | {"mlflow": here.mlflow, "pydantic": pydantic.VERSION}
    nearest = {
        package: low if release(version) < release(low) else high
        for package, (low, high) in tested.items()
        if (version := own[package]) and not release(low) <= release(version) <= release(high)
    }
    if not nearest:
        return None
    found = ", ".join(f"{name} {own[name]} (tested: {' to '.join(tested[name])})" for name in nearest)
    python = [f"use Python {nearest.pop('Python')}"] if "Python" in nearest else []
    packages = " ".join(f"{name}=={version.partition('+')[0]}" for name, version in nearest.items())
    fix = "; ".join(python + [f"pip install {packages}"] * bool(packages))
    what = f"allowed, but not tested: {found}"
    return CheckResult(subject="versions", status="warning", what=what, fix=fix)
