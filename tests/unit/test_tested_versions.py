"""Ranges of versions: what was run, what the doctor says outside of it, and the page that shows both."""

import re
import runpy
from pathlib import Path
from typing import Any

import pydantic
import pytest

from pipeline.cluster.node_facts import NodeFacts, Torch, facts_here
from pipeline.commands.doctor import tested
from pipeline.commands.doctor.tested import PACKAGES, Environment

TESTS = Path(__file__).parents[1]
RANGES = {"Python": ("3.11.7", "3.13.0"), "torch": ("2.8.0", "2.13.0+cpu"), "ray": ("2.44.0", "2.60.0")}


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TESTS)
        return runpy.run_path(str(TESTS / "versions.py"))


def here(*, torch: str = "2.13.0+cu130", **facts: str) -> NodeFacts:
    about = Torch(version=torch, cuda=None, nccl=None, cuda_available=None, cuda_error=None)
    return facts_here().model_copy(update={"python": "3.12.1", "ray": "2.60.3", "torch": about, **facts})


@pytest.mark.parametrize(
    ("facts", "said", "fix"),
    [
        ({"torch": "2.14.0"}, "torch 2.14.0 (tested: 2.8.0 to 2.13.0+cpu)", "pip install torch==2.13.0"),
        ({"torch": "2.7.1"}, "torch 2.7.1 (tested: 2.8.0 to 2.13.0+cpu)", "pip install torch==2.8.0"),
        ({"python": "3.14.2"}, "Python 3.14 (tested: 3.11.7 to 3.13.0)", "use Python 3.13.0"),
        ({"python": "3.10.1", "ray": "2.61.0"}, "ray 2.61.0", "use Python 3.11.7; pip install ray==2.60.0"),
    ],
)
def test_a_release_outside_of_what_was_tested_is_said_in_one_sentence(
    facts: dict[str, str], said: str, fix: str
) -> None:
    finding = tested.check_tested_versions(here(**facts), RANGES)

    assert finding is not None
    assert finding.status == "warning"
    assert said in finding.what
    assert finding.fix == fix


def test_another_patch_or_build_of_a_tested_release_is_none() -> None:
    assert tested.check_tested_versions(here(), RANGES) is None
    assert tested.check_tested_versions(here(torch="2.13.7", ray="2.44.9"), RANGES) is None
    assert tested.check_tested_versions(here(), {"pydantic": (pydantic.VERSION, pydantic.VERSION)}) is None


def test_only_environments_in_which_all_tests_passed_count() -> None:
    def ran(version: str, **more: Any) -> Environment:
        return Environment(date="2026-11-24", versions=dict.fromkeys(PACKAGES, version), **more)

    passed = {"tests": {"contract": "9 passed"}}
    environments = [
        ran("2.9.0", **passed),
        ran("2.10.0", **passed),
        ran("2.11.0", tests={"contract": "1 failed"}, failed=("test_x",)),
        ran("2.8.0"),
        Environment(date="2026-11-24", not_run="there is no python3.14 here"),
    ]
    assert tested.ranges(environments) == dict.fromkeys(PACKAGES, ("2.9.0", "2.10.0"))


def test_the_page_is_what_the_results_say(script: dict[str, Any]) -> None:
    written = "\n".join(script["page"](tested.results())) + "\n"
    assert (TESTS.parent / "docs" / "versions.md").read_text() == written, "run: python tests/versions.py --page"


def test_an_environment_that_was_not_run_is_not_shown_as_passed(script: dict[str, Any]) -> None:
    lines = list(script["page"]({"lowest": Environment(date="2026-11-24", not_run="no uv")}))
    rows = [line for line in lines if " passed" in line]
    assert rows == []
    assert "not run: no uv" in next(line for line in lines if line.startswith("| `lowest`") and "2026" in line)


def test_an_upper_end_of_a_range_has_its_reason_beside_it() -> None:
    lines = (TESTS.parent / "pyproject.toml").read_text().splitlines()
    assert [line for line in lines if re.search(r'"[\w\[\]-]+[=<>][^"]*<', line) and "#" not in line] == []


def test_a_python_that_is_missing_is_no_other_one(script: dict[str, Any]) -> None:
    assert script["interpreter"]("3.98") is None
