"""Samples in tar files, written by WebDataset's own library and by tar."""

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset

from pipeline.config.schema import Loader
from pipeline.data import shard_files, shards
from pipeline.errors import ExperimentError, TrainingError
from pipeline.training.loader import BatchLoader


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


def test_any_sample_can_be_read(written):
    train, validation = shards(
        train="train-{000000..000002}.tar", validation="train-000002.tar", fields=["png", "cls", "json"]
    )

    assert (len(train), len(validation)) == (11, 3)
    for i in (10, 5, 0, 4, 3, 8):
        picture, label, more = train[i]
        assert (picture.shape, picture.dtype) == ((3, 4, 5), torch.float32)
        assert picture[0, 0, 0] == pytest.approx(10 * i / 255)
        assert (label, more) == (i, {"name": f"n{i}"})
    assert validation[0][1] == 8


def test_an_index_is_kept_until_the_shard_changes(written, monkeypatch):
    found = []
    index_of = shard_files.index_of
    monkeypatch.setattr(
        shard_files,
        "index_of",
        lambda path, *more, **keys: found.append(path.name) or index_of(path, *more, **keys),
    )

    def read(*fields):
        found.clear()
        first = shards(train=str(written / "train-000000.tar"), fields=fields).train[0]
        return list(found), first[-1]

    assert read("cls") == (["train-000000.tar"], 0)
    assert read("cls") == ([], 0)
    assert read("png", "cls") == (["train-000000.tar"], 0)  # other fields
    (written / "train-000001.tar").rename("train-000000.tar")
    assert read("png", "cls") == (["train-000000.tar"], 4)
    Path("train-000000.tar.index.npz").write_text("torn")
    assert read("png", "cls") == (["train-000000.tar"], 4)


def test_an_index_that_cannot_be_kept_is_found_again(written):
    Path("train-000000.tar.index.npz").mkdir()
    before = sorted(written.iterdir())

    assert len(shards(train="train-000000.tar", fields=["cls"]).train) == 4
    assert sorted(written.iterdir()) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": "nowhere.tar"}, r"data\.train: can't read nowhere\.tar \(No such file"),
        ({"train": "packed.tar.gz"}, r"data\.train: packed\.tar\.gz is no plain tar file"),
        ({"train": []}, r"data\.train: names no file"),
        ({"train": "ragged.tar"}, r"data\.fields: ragged\.tar: sample b has txt, but no cls; name fields"),
        ({"fields": ["jpeg"]}, r"data\.fields: train-000000\.tar: sample 00000 has cls, json, npy, png, but no jpeg"),
        ({"fields": []}, r"data\.fields: is \[\]; write the endings"),
        ({"fields": "png"}, r"data\.fields: is 'png'; write the endings"),
        ({"fields": ["pth"]}, r"data\.fields: decoding pth may run any code"),
        ({"fields": ["xyz"]}, r"data\.fields: xyz can't be decoded; known endings are apng, "),
    ],
)
def test_unusable_shards_are_named(written, changes, message):
    tar("ragged.tar", a__cls=b"1", b__txt=b"text")
    with tarfile.open("packed.tar.gz", "w:gz") as archive:
        archive.add("train-000000.tar")

    with pytest.raises(ExperimentError, match=message):
        shards(**{"train": "train-000000.tar", "fields": ["cls"]} | changes)


def test_a_sample_that_cannot_be_decoded_is_named(written):
    tar("broken.tar", a__cls=b"1", b__cls=b"one")
    train, _ = shards(train="broken.tar", fields=["cls"])
    loader = BatchLoader(train, options=Loader(), collate=None, seed=0, device=torch.device("cpu"))

    with pytest.raises(
        TrainingError, match=r"sample 1 of the data can't be read: ValueError: broken\.tar: ValueError: "
    ):
        loader.read([0, 1])


def test_a_shard_that_was_cut_meanwhile_is_named(written):
    train, _ = shards(train="train-000000.tar", fields=["png"])
    os.truncate("train-000000.tar", 1000)

    with pytest.raises(
        ValueError, match=r"train-000000\.tar: EOFError: the shard has fewer than [0-9]+ bytes; has it changed"
    ):
        train[3]
