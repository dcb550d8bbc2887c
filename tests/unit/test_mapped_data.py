"""Arrays and token files that stay in their files, whoever reads them."""

# promise: data larger than memory: mapped files

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loading import loader, part

from pipeline.data import arrays, tokens
from pipeline.errors import ExperimentError

INPUTS = np.arange(60, dtype=np.float32).reshape(10, 3, 2)
PAIR = {"inputs": "x.npy", "targets": "y.npy"}


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files in the working directory, good and bad."""
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", INPUTS)
    np.save("y.npy", np.arange(10))
    np.save("short.npy", np.arange(9))
    np.save("one.npy", 1)
    np.save("names.npy", np.array(["a"]))
    np.save("objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    Path("text.npy").write_text("no array")
    Path("raw.bin").write_bytes(bytes(8))
    Path("odd.bin").write_bytes(b"abc")
    Path("empty.bin").touch()
    raw("a.bin", 11)


def raw(name: str, count: int, *, first: int = 0) -> str:
    np.arange(first, first + count).astype("uint16").tofile(name)
    return name


def test_a_batch_is_what_numpy_would_index() -> None:
    train: Any
    train, validation = arrays(**PAIR)
    inputs, targets = train.batch([7, 0, 7])
    assert (len(train), validation) == (10, None)
    assert torch.equal(inputs, torch.from_numpy(INPUTS[[7, 0, 7]]))
    assert targets.tolist() == [7, 0, 7]
    assert torch.equal(train[3][0], torch.from_numpy(INPUTS[3]))
    transformed: Any = arrays(**PAIR, transform=lambda image: image.flatten() * 2)[0]
    assert transformed[4][0].tolist() == (INPUTS[4].flatten() * 2).tolist()
    inputs.zero_()  # leaves the file alone
    assert np.array_equal(np.load("x.npy"), INPUTS)


def test_relative_paths_begin_where_the_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    sets: Any = arrays(**PAIR, validation_inputs="x.npy", validation_targets="y.npy")
    monkeypatch.chdir("/")  # as a worker's may be
    sent = pickle.dumps(sets.train)
    assert len(pickle.loads(sent)) == len(sets.validation) == 10
    assert INPUTS.tobytes() not in sent, "the other process maps the file"


def test_tables_are_read_a_batch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And sample by sample for a collate of the user's."""
    train, read = arrays(**PAIR)[0], list[Any]()
    monkeypatch.setattr(type(train), "batch", lambda self, indices: read.append(indices) or (torch.zeros(2),) * 2)
    for collate in (None, list):
        reader = loader(train, collate=collate)
        read.clear()
        list(reader.batches([part(7, 3)]))
        assert read == ([[7], [3]] if collate else [[7, 3]])


def test_windows_of_tokens_go_on_in_the_next_file() -> None:
    np.save("b.npy", np.arange(100, 107, dtype=np.int32))
    train: Any
    train, validation = tokens(train=[raw("a.bin", 7), "b.npy"], validation="a.bin", length=3)
    windows = [train[index][0].tolist() for index in range(len(train))]
    assert windows == [[0, 1, 2], [3, 4, 5], [100, 101, 102], [103, 104, 105]]
    inputs, following = train.batch([3, 1])
    assert inputs.tolist() == [[103, 104, 105], [3, 4, 5]]
    assert following.tolist() == [[104, 105, 106], [4, 5, 6]]
    assert inputs.dtype == torch.int64
    assert len(validation) == 2  # type: ignore[arg-type]
    assert tokens(train=raw("a.bin", 3, first=65_533), length=2).train[0][1].tolist() == [65_534, 65_535]


ARRAYS = {
    r"data\.inputs: can't read nowhere\.npy \(No such file": {"inputs": "nowhere.npy"},
    r"data\.inputs: text\.npy can't be mapped \(.*\); write it with numpy\.save": {"inputs": "text.npy"},
    r"data\.inputs: raw\.bin can't be mapped \(only \.npy files store their dtype\)": {"inputs": "raw.bin"},
    r"data\.inputs: one\.npy can't be mapped \(it holds a single value": {"inputs": "one.npy"},
    r"data\.inputs: names\.npy can't be mapped \(.*numpy\.str_": {"inputs": "names.npy"},
    r"data\.inputs: objects\.npy can't be mapped \(.*(allow_pickle|objects)": {"inputs": "objects.npy"},
    r"data\.targets: short\.npy has 9 rows, but x\.npy has 10": {"targets": "short.npy"},
    r"data\.validation_targets: missing; validation needs both": {"validation_inputs": "x.npy"},
}
TOKENS = {
    r"data\.train: can't read nowhere\.bin": {"train": "nowhere.bin"},
    r"odd\.bin can't be mapped \(its 3 bytes are not a multiple of the size of uint16\)": {"train": "odd.bin"},
    r"data\.train: empty\.bin can't be mapped": {"train": "empty.bin"},
    r"data\.train: x\.npy holds float32 of shape \(10, 3, 2\); it must be one-dimensional": {"train": "x.npy"},
    r"data\.train: a\.bin has 11 tokens, but a window of 11 needs 12": {"length": 11},
    r"data\.length: is 0": {"length": 0},
    r"data\.dtype: is float32; choose one of uint8, uint16": {"dtype": "float32"},
}


@pytest.mark.parametrize(
    ("make", "usual", "changes", "message"),
    [
        *((arrays, PAIR, changes, message) for message, changes in ARRAYS.items()),
        *((tokens, {"train": "a.bin", "length": 3}, changes, message) for message, changes in TOKENS.items()),
    ],
)
def test_unusable_files_are_named(make: Any, usual: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        make(**usual | changes)
