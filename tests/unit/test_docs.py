"""The README and the experiment files say what is true."""

# promise: every command and YAML in the docs is valid

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DESIGN = (ROOT / "docs" / "design.md").read_text()
EXPERIMENTS = sorted((ROOT / "experiments").glob("*.yaml"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "tests/README.md", "experiments/README.md")),
    *sorted(ROOT.glob("docs/*.md")),
]


def test_readme_is_short_and_opens_with_a_command():
    lines = README.splitlines()
    assert len(lines) <= 120
    assert lines.index("```bash") < 10


def test_every_command_is_in_the_pages(command):
    names = re.findall(r"^│ (\w[\w-]*) ", command("--help").stdout, re.MULTILINE)
    assert {"run", "check", "ui", "sync", "schema"} <= set(names)
    pages = "".join(path.read_text() for path in PAGES)
    assert [name for name in names if f"pipeline {name}" not in pages] == []


def test_every_make_target_of_the_readme_exists():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = [*re.findall(r"make ([a-z-]+)\b", " ".join(re.findall(r"`([^`]+)`", README))), "run"]
    assert set(named) <= set(targets)


def test_every_experiment_is_in_the_pages():
    pages = "".join(path.read_text() for path in PAGES)
    assert [path.name for path in EXPERIMENTS if path.name not in pages] == []


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_experiment_opens_with_its_command(path):
    schema, line = path.read_text().splitlines()[:2]
    assert schema == "# yaml-language-server: $schema=experiment.schema.json"
    assert line == f"# pipeline run experiments/{path.name}"


def test_readme_error_is_the_real_one(command, tmp_path):
    shown = re.search(r"experiments/resnet.yaml:(\d+): (train\.batchsize: .+)", README)
    assert shown
    broken = tmp_path / "resnet.yaml"
    text = (ROOT / "experiments" / "resnet.yaml").read_text().replace("global_batch_size: 128", "batchsize: 128")
    broken.write_text(text)
    ended = command("check", str(broken))
    assert ended.code == 2
    assert f"{broken}:{shown[1]}: {shown[2]}" in ended.stderr


def test_readme_yaml_is_a_valid_experiment(command, tmp_path):
    text = re.search(r"```yaml\n(# experiments/resnet.yaml.*?)```", README, re.DOTALL)
    assert text
    file = tmp_path / "short.yaml"
    file.write_text(text[1])
    assert "ok" in command("check", "--no-data", str(file)).stdout  # a batch of a ResNet takes too long here


def test_every_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + extras["dev"] + extras["bench"]
    names = {re.split(r"[\[<>=]", name)[0].lower().replace("_", "-") for name in wanted}
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in pins if "==" in line}
    assert names - pinned == set()
    assert "torch==2.13.0" in pins


def test_the_required_packages_are_those_of_the_table():
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = sorted(re.split("[<>=~!]", name)[0] for name in required)
    table = (ROOT / "benchmarks" / "packages.md").read_text()
    assert sorted(re.findall(r"^\| ([a-z][\w\[\]-]*) \|", table, re.MULTILINE)[1:]) == names


def test_the_optional_packages_are_those_of_the_page():
    optional = (ROOT / "docs" / "index.md").read_text().partition("## Optional packages")[2]
    assert {name for row in re.findall(r"(?m)^\| (`.+?) \|", optional) for name in re.findall("`(.+?)`", row)} == {
        *("cookiecutter", "lightning", "onnx", "onnxscript", "optuna"),
        *("s3fs", "tensorboard", "transformers", "wandb"),
    }


def test_the_map_is_the_contract_of_the_layers():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (one["layers"] for one in contracts if one.get("containers") == ["pipeline"])
    drawn: dict[str, set[str]] = {}
    for layer, folder in re.findall(r"(?m)^\| (\d) \| `(\w+)` \| .+ \|$", DESIGN):
        drawn.setdefault(layer, set()).add(folder)
    assert list(drawn.values()) == [set(re.split(r" [|:] ", layer)) for layer in layers]
    assert f"{len(layers)} layers" in DESIGN.replace("six", "6")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_names_files_that_exist(page: Path) -> None:
    paths = set(re.findall(r"`((?:pipeline|tests|docs|experiments|benchmarks)/[\w./-]+)`", page.read_text()))
    roots = (ROOT, *ROOT.glob("templates/*/{{*"))
    assert [path for path in paths if "NAME" not in path and not any((root / path).exists() for root in roots)] == []


def test_the_hops_name_functions_that_exist() -> None:
    stops = re.findall(r"`(pipeline/[\w/]+\.py): (\w+)`", DESIGN)
    assert len(stops) > 15
    for path, name in stops:
        assert re.search(rf"^(?:(?:def|class) )?{name}\b", (ROOT / path).read_text(), re.MULTILINE), f"{path}: {name}"
