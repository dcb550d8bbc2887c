"""Arrays and token files that stay in their files, whoever reads them."""

# promise: data larger than memory: mapped files

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.data import arrays, tokens
from pipeline.errors import ExperimentError
from pipeline.training.batches.readers import Rows, fetcher

INPUTS = np.arange(60, dtype=np.float32).reshape(10, 3, 2)
TARGETS = np.arange(10)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    np.save(tmp_path / "x.npy", INPUTS)
    np.save(tmp_path / "y.npy", TARGETS)
    return {"inputs": f"{tmp_path}/x.npy", "targets": f"{tmp_path}/y.npy"}


def bin_file(path: Path, count: int, *, first: int = 0, dtype: str = "uint16") -> str:
    np.arange(first, first + count).astype(dtype).tofile(path)
    return str(path)


class TestArrays:
    def test_a_batch_is_what_numpy_would_index(self, files):
        train, validation = arrays(**files)
        inputs, targets = train.batch([7, 0, 7])

        assert validation is None
        assert len(train) == 10
        assert torch.equal(inputs, torch.from_numpy(INPUTS[[7, 0, 7]]))
        assert targets.tolist() == [7, 0, 7]
        assert (train[3][0] == torch.from_numpy(INPUTS[3])).all()

    def test_relative_paths_begin_where_the_command_runs(self, files, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        train, validation = arrays(
            inputs="x.npy", targets="y.npy", validation_inputs="x.npy", validation_targets="y.npy"
        )

        monkeypatch.chdir("/")  # as a worker's may be
        assert len(pickle.loads(pickle.dumps(train))) == len(validation) == 10

    def test_changing_a_batch_leaves_the_file_alone(self, files):
        train, _ = arrays(**files)
        train.batch([1])[0].zero_()

        assert np.array_equal(np.load(files["inputs"]), INPUTS)

    def test_a_transform_gets_each_input(self, files):
        train, _ = arrays(**files, transform=lambda image: image.flatten() * 2)

        assert train[4][0].tolist() == (INPUTS[4].flatten() * 2).tolist()
        assert train[4][1] == 4

    def test_the_other_process_maps_the_file_instead_of_getting_it(self, files):
        np.save(files["inputs"], np.zeros((10, 100_000), np.float32))
        train, _ = arrays(**files)

        assert len(pickle.dumps(train)) < 1000

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"inputs": "nowhere.npy"}, r"data\.inputs: can't read nowhere\.npy \(No such file"),
            ({"inputs": "text.npy"}, r"data\.inputs: text\.npy can't be mapped \(.*\); write it with numpy\.save"),
            ({"inputs": "raw.bin"}, r"data\.inputs: raw\.bin can't be mapped \(only \.npy files store their dtype\)"),
            ({"inputs": "one.npy"}, r"data\.inputs: one\.npy can't be mapped \(it holds a single value"),
            ({"inputs": "names.npy"}, r"data\.inputs: names\.npy can't be mapped \(.*numpy\.str_"),
            ({"inputs": "objects.npy"}, r"data\.inputs: objects\.npy can't be mapped \(.*allow_pickle|objects"),
            ({"targets": "short.npy"}, r"data\.targets: short\.npy has 9 rows, but .*x\.npy has 10"),
            ({"validation_inputs": "x.npy"}, r"data\.validation_targets: missing; validation needs both"),
        ],
    )
    def test_unusable_files_are_named(self, files, tmp_path, monkeypatch, changes, message):
        monkeypatch.chdir(tmp_path)
        Path("text.npy").write_text("no array")
        Path("raw.bin").write_bytes(bytes(8))
        np.save("one.npy", 1)
        np.save("names.npy", np.array(["a"]))
        np.save("objects.npy", np.array([{}], dtype=object), allow_pickle=True)
        np.save("short.npy", TARGETS[:9])

        with pytest.raises(ExperimentError, match=message):
            arrays(**files | changes)


class TestTokens:
    def test_targets_are_the_next_tokens(self, tmp_path):
        train, validation = tokens(train=bin_file(tmp_path / "a.bin", 11), length=4)
        inputs, following = train.batch([1, 0])

        assert (len(train), validation) == (2, None)
        assert inputs.tolist() == [[4, 5, 6, 7], [0, 1, 2, 3]]
        assert following.tolist() == [[5, 6, 7, 8], [1, 2, 3, 4]]
        assert inputs.dtype == torch.int64

    def test_large_tokens_are_no_negative_numbers(self, tmp_path):
        train, _ = tokens(train=bin_file(tmp_path / "a.bin", 3, first=65_533), length=2)

        assert train[0][1].tolist() == [65_534, 65_535]

    def test_windows_go_on_in_the_next_file(self, tmp_path):
        np.save(tmp_path / "b.npy", np.arange(100, 107, dtype=np.int32))
        files = [bin_file(tmp_path / "a.bin", 7), f"{tmp_path}/b.npy"]
        train, validation = tokens(train=files, validation=files[0], length=3)

        assert [train[i][0].tolist() for i in range(len(train))] == [
            [0, 1, 2],
            [3, 4, 5],
            [100, 101, 102],
            [103, 104, 105],
        ]
        assert train.batch([3, 1])[1].tolist() == [[104, 105, 106], [4, 5, 6]]
        assert len(validation) == 2

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"train": "nowhere.bin"}, r"data\.train: can't read nowhere\.bin"),
            (
                {"train": "odd.bin"},
                r"data\.train: odd\.bin can't be mapped \(its 3 bytes are not a multiple of the size of uint16\)",
            ),
            ({"train": "empty.bin"}, r"data\.train: empty\.bin can't be mapped"),
            (
                {"train": "x.npy"},
                r"data\.train: x\.npy holds float32 of shape \(10, 3, 2\); it must be one-dimensional",
            ),
            (
                {"length": 10},
                r"data\.train: a\.bin has 10 tokens, but a window of 10 needs 11",
            ),
            ({"length": 0}, r"data\.length: is 0"),
            ({"dtype": "float32"}, r"data\.dtype: is float32; choose one of uint8, uint16"),
        ],
    )
    def test_unusable_files_are_named(self, tmp_path, monkeypatch, changes, message):
        monkeypatch.chdir(tmp_path)
        bin_file(Path("a.bin"), 10)
        Path("odd.bin").write_bytes(b"abc")
        Path("empty.bin").touch()
        np.save("x.npy", INPUTS)

        with pytest.raises(ExperimentError, match=message):
            tokens(**{"train": "a.bin", "length": 3} | changes)


def test_tables_are_read_a_batch_at_a_time(files):
    """And sample by sample for a collate of the user's."""
    train, _ = arrays(**files)

    assert isinstance(fetcher(train, collate=None, seed=0), Rows)
    assert not isinstance(fetcher(train, collate=list, seed=0), Rows)
