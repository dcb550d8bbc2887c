"""Shards that loader processes read, that tar made, and where the library is missing."""

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image

from pipeline.config.schema import Loader
from pipeline.data import shards
from pipeline.training.loader import BatchLoader
from pipeline.training.order import MicroBatch


def image(brightness: int) -> np.ndarray:
    return np.full((4, 5, 3), brightness, np.uint8)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three shards of 4, 4 and 3 samples."""
    monkeypatch.chdir(tmp_path)
    with webdataset.ShardWriter("train-%06d.tar", maxcount=4, verbose=0) as writer:
        for i in range(11):
            key = f"{'long/' * 30}{i:05d}" if i == 5 else f"{i:05d}"  # longer than a tar header's field
            writer.write(
                {"__key__": key, "png": image(10 * i), "cls": i, "json": {"name": f"n{i}"}, "npy": np.arange(i)}
            )
    return tmp_path


def tar(name: str, **files: bytes) -> None:
    with tarfile.open(name, "w") as archive:
        for path, content in files.items():
            member = tarfile.TarInfo(path.replace("__", "."))
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def test_batches_come_from_loader_processes_too(written):
    train, _ = shards(train=["train-000000.tar", "train-000002.tar"], fields=["png", "cls"], transform=torch.flatten)
    micro_batches = [
        MicroBatch(0, [6, 1], weight=1.0, is_last=True),
        MicroBatch(0, [2, 3, 5], weight=1.0, is_last=True),
    ]
    loader = BatchLoader(train, options=Loader(num_workers=2), collate=None, seed=0, device=torch.device("cpu"))
    batches = [batch for _, batch in loader.batches(micro_batches)]

    assert [labels.tolist() for _, labels in batches] == [[10, 1], [2, 3, 9]]
    assert [tuple(pictures.shape) for pictures, _ in batches] == [(2, 60), (3, 60)]


def test_shards_of_tar_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, label in (("a", "3"), ("b", "4")):
        Image.fromarray(image(50)).save(f"{name}.seg.png")
        Path(f"{name}.cls").write_text(label)
    Path("README").write_text("no sample")
    subprocess.run(["tar", "cf", "all.tar", "README", "a.seg.png", "a.cls", "b.seg.png", "b.cls"], check=True)
    train, _ = shards(train="all.tar", fields=["cls", "seg.png"])

    assert [label for label, _ in map(train.__getitem__, range(2))] == [3, 4]


def test_without_the_library_it_is_said(written):
    code = (
        "import sys; sys.modules['webdataset'] = None\n"
        "from pipeline.data import shards\n"
        "shards(train='train-000000.tar', fields=['cls'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert "data: shards need webdataset, which is not installed: pip install webdataset" in done.stderr
