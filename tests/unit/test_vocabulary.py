"""What a shell can complete: keys, values and components, without importing anything heavy."""

from pathlib import Path

import pytest

from pipeline import registry
from pipeline.config import vocabulary

ROOT = Path(__file__).parents[2]


def test_keys_are_those_of_the_schema_and_of_the_file() -> None:
    known = vocabulary.all_keys(ROOT / "experiments" / "mlp.yaml")

    assert {"train.epochs", "parallel.options", "model._target_", "model.hidden", "loader.num_workers"} <= set(known)
    assert not {"train", "model", "parallel"} & set(known)
    assert len(known) == len(set(known))


@pytest.mark.parametrize("content", [None, b"a: [", b"\xff\xfe", b"- 1"])
def test_a_file_that_cannot_be_read_adds_no_keys(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "broken.yaml"
    if content is not None:
        file.write_bytes(content)
    assert "train.epochs" in vocabulary.all_keys(file)


def test_a_file_without_an_end_adds_no_keys() -> None:
    assert "train.epochs" in vocabulary.all_keys(Path("/dev/zero"))


def test_keys_of_the_file_that_one_extends_are_known(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("model: {_target_: pipeline.models.MLP, hidden: [8]}\n")
    (tmp_path / "own.yaml").write_text("extends: base.yaml\n")
    assert "model.hidden" in vocabulary.all_keys(tmp_path / "own.yaml")


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("parallel.launcher", list(registry.names("launchers"))),
        ("train.precision", ["fp32", "fp64", "bf16", "fp16"]),
        ("loader.pin_memory", ["true", "false", "auto"]),
        ("compare[0].strategy", list(registry.names("strategies"))),
        ("train.epochs", []),
        ("nothing.like.it", []),
        ("[", []),
    ],
)
def test_values_are_those_of_the_schema(key: str, values: list[str]) -> None:
    assert sorted(vocabulary.values_of(key)) == sorted(values)


def test_components_of_the_project_are_found_without_running_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "src" / "mine"
    package.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[tool.pipeline]\npackages = ["mine", "gone"]\n')
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "nets.py").write_text("class Net: ...\ndef build(): ...\ndef _inner(): ...\n")
    (package / "torn.py").write_text("def (\n")
    monkeypatch.chdir(tmp_path)

    offered = vocabulary.values_of("model._target_")

    assert offered[-2:] == ["mine.nets.Net", "mine.nets.build"]
    assert offered[0].startswith("pipeline.models.")


def test_a_broken_pyproject_still_leaves_the_built_in_components(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.pipeline\n")
    monkeypatch.chdir(tmp_path)
    assert "torch.optim.SGD" in vocabulary.values_of("optimizer._target_")
