"""A checkpoint counts once all of it is on the disk: what a power failure may leave is never taken for whole."""

import os
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from pipeline.training.checkpoints.files import write_unsharded
from pipeline.training.checkpoints.state import State
from pipeline.training.checkpoints.storage import Storage


class Synced(NamedTuple):
    """A file or folder that was written to the disk, and what its folder held at that moment."""

    path: Path
    beside: frozenset[str]


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Synced]:
    found: list[Synced] = []

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        found.append(Synced(path, frozenset(each.name for each in path.parent.iterdir())))

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def test_each_file_is_written_to_the_disk(tmp_path: Path, synced: list[Synced]) -> None:
    written = write_unsharded(State({"model/weight": torch.ones(2)}, {"meter": 1}), tmp_path)
    names = {each.path.name for each in synced}
    assert {file.name for file in written} == names == {"state.safetensors", "values.json"}


def test_a_manifest_has_its_name_once_it_is_on_the_disk(tmp_path: Path, synced: list[Synced]) -> None:
    (tmp_path / "step-00000001").mkdir()
    Storage(str(tmp_path)).write("step-00000001/manifest.json", b"{}")
    content, folder = synced
    assert "manifest.json" not in content.beside
    assert folder.path == tmp_path / "step-00000001"
    assert [(each.name, each.read_bytes()) for each in folder.path.iterdir()] == [("manifest.json", b"{}")]


def test_names_in_a_folder_are_written_to_the_disk(tmp_path: Path, synced: list[Synced]) -> None:
    with Storage(str(tmp_path)).staging("step-00000001") as folder:
        assert synced == []
    assert [each.path for each in synced] == [folder, tmp_path]
