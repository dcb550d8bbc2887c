"""Every command and every YAML of the documentation, read as the real command reads it; nothing is started here.

A block with the comment ``<!-- test: run -->`` above it is executed, in test_walkthroughs.py. What can neither be read
nor run here is named below with the reason; a block that is none of these fails.
"""

# promise: every command and YAML in the docs is valid

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from blocks import Block, blocks, inline_commands
from typed import mentioned, parts, understand

from pipeline.drive import preflight
from pipeline.experiment.load import load

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "experiments/README.md")),
    *sorted(ROOT.glob("examples/**/*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("templates/*/*/AGENTS.md")),
]
BLOCKS = [block for page in PAGES for block in blocks(page, root=ROOT)]
ELSEWHERE = {
    r"docker compose ": "needs a container engine; make test-docker runs the cluster of docker/compose.yaml",
    r"export (RAY_AUTH_MODE|AWS_\w+)=": "credentials of a service that isn't there",
    r"export MASTER_ADDR=": "a node of Slurm",
    r"pip install git\+https://HOST/": "the address is the reader's",
    r"make install$": "in a clone, see above",
    r"git clone ": "the address is the reader's",
    r"cd pipeline$": "into what was cloned",
    r"source \.venv/bin/activate$": "the tests have an environment",
    r"cookiecutter templates$": "asks questions; tests/slow/templates bakes with it",
    r"(torchrun|srun) .* -m pipeline run ": "several machines; test_outer_nodes.py starts what they start there",
    r"ray job submit ": "needs a cluster; test_jobs.py submits to a head of Ray",
    r"sbatch ": "a batch system; test_slurm_jobs.py runs the script",
}
"""Commands that can't be read or run here, and why."""
NOBODYS = {
    "docs/model-and-data.md": "mine", "README.md": "mypackage",
}  # fmt: skip
"""Packages that only a reader has, whose components can't be looked for."""


def of(kind: str) -> list[Block]:
    return [block for block in BLOCKS if block.kind == kind]


def place(block: Block) -> str:
    return block.place


def test_there_are_blocks_of_each_kind() -> None:
    assert len(of("commands")) > 30
    assert len(of("yaml")) > 10
    assert len(of("python")) > 3


@pytest.mark.parametrize("block", of("commands"), ids=place)
def test_a_command_is_one_that_is_there(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for command in (part for line in block.lines for part in parts(line)):
        if block.is_run:  # with files of its page, which aren't here
            assert command.split()[0] != "pipeline" or not mentioned(command)
        else:
            known = any(re.match(pattern, command) for pattern in ELSEWHERE)
            assert known or understand(command), f"{command}: say how it is tested, see {__file__}"


def test_every_exception_is_needed() -> None:
    commands = [part for block in of("commands") for line in block.lines for part in parts(line)]
    assert [pattern for pattern in ELSEWHERE if not any(re.match(pattern, each) for each in commands)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_command_in_a_sentence_is_there(page: Path) -> None:
    for command in inline_commands(page):
        mentioned(command)


@pytest.mark.parametrize("block", [block for block in of("yaml") if not block.title], ids=place)
def test_yaml_is_an_experiment_or_a_part_of_one(block: Block, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    given = yaml.safe_load(re.sub(r"\bon: ", '"on": ', block.text))  # a boolean for PyYAML, a key for ours
    assert isinstance(given, dict)
    file = tmp_path / "experiment.yaml"
    file.write_text(yaml.safe_dump(completed(given)))
    loaded = load(file)
    if f"{NOBODYS.get(block.page)}." not in block.text:
        preflight.check(loaded)


def completed(given: dict[str, Any]) -> dict[str, Any]:
    """A part of an experiment with all that it leaves out, that of experiments/mlp.yaml."""
    if {"name", "model", "data", "train"} <= given.keys() and {"optimizer", "optimizers"} & given.keys():
        return given
    whole = yaml.safe_load((ROOT / "experiments" / "mlp.yaml").read_text())
    replaced = {"loss": {"task", "optimizers"}, "optimizer": {"optimizers"}}
    for key in (key for key, others in replaced.items() if others & given.keys() and key not in given):
        del whole[key]
    for key, value in given.items():
        is_section = isinstance(value, dict) and "_target_" not in value
        whole[key] = {**whole.get(key, {}), **value} if is_section else value
    return whole


@pytest.mark.parametrize("name", ["digits.py", "digits.yaml", "pyproject.toml"])
def test_the_tutorial_ends_with_the_files_of_its_example(name: str) -> None:
    shown = [block for block in BLOCKS if block.page == "docs/tutorial.md" and block.title == name]
    assert [block.is_added for block in shown] == [block is not shown[0] for block in shown]
    assert "".join(f"{block.text}\n" for block in shown) == (ROOT / "examples" / "tutorial" / name).read_text()


def test_the_submitted_tutorial_is_what_a_cluster_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = [line for block in BLOCKS if block.page == "docs/distributed.md" for line in block.lines]
    (line,) = [line for line in typed if line.startswith("ray job submit ") and "digits.yaml" in line]
    monkeypatch.chdir(ROOT / "examples" / "tutorial")
    assert load("digits.yaml", re.findall(r"\S+=\S+", line)).experiment.parallel.placement == "strict_spread"


@pytest.mark.parametrize("block", of("toml"), ids=place)
def test_toml_is_toml(block: Block) -> None:
    assert tomllib.loads(block.text)


@pytest.mark.parametrize("block", of("python"), ids=place)
def test_python_is_executed_somewhere(block: Block) -> None:
    assert ast.parse(block.text).body
    walked = any(other.is_run for other in BLOCKS if other.page == block.page)
    assert block.is_run or (block.title and walked), "say how it is tested: a title, or <!-- test: run -->"


@pytest.mark.parametrize("block", of("output"), ids=place)
def test_an_output_hides_no_command(block: Block) -> None:
    assert not re.search(r"(?m)^(pipeline|make|python) ", block.text)
    assert not block.is_run
