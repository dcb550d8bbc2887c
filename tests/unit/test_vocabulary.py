"""Keys of the experiment file."""

from pathlib import Path

import pytest

from pipeline.experiment import load

ROOT = Path(__file__).parents[2]


def test_keys_are_those_of_the_schema_and_of_the_file() -> None:
    known = load.list_keys(ROOT / "experiments" / "mlp.yaml")

    assert {"train.epochs", "parallel.options", "model._target_", "model.hidden", "loader.num_workers"} <= set(known)
    assert not {"train", "model", "parallel"} & set(known)
    assert len(known) == len(set(known))


@pytest.mark.parametrize("content", [None, b"a: [", b"\xff\xfe", b"- 1"])
def test_a_file_that_cannot_be_read_adds_no_keys(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "broken.yaml"
    if content is not None:
        file.write_bytes(content)
    assert "train.epochs" in load.list_keys(file)


def test_a_file_without_an_end_adds_no_keys() -> None:
    assert "train.epochs" in load.list_keys(Path("/dev/zero"))


def test_keys_of_the_file_that_one_extends_are_known(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("model: {_target_: pipeline.models.MLP, hidden: [8]}\n")
    (tmp_path / "own.yaml").write_text("extends: base.yaml\n")
    assert "model.hidden" in load.list_keys(tmp_path / "own.yaml")
