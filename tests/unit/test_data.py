"""The datasets that the package brings along, arrays and token files that stay in their files, versions of data."""

# promise: data larger than memory: mapped files
# promise: a version that the data has is recorded with its digest

import pickle
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toys
from checkpointed import run
from loading import loader, part
from sklearn import datasets
from torch import Tensor

from pipeline.data import arrays, characters, digits, tabular, tokens
from pipeline.data.bundled import VOCABULARY_SIZE
from pipeline.errors import ExperimentError
from pipeline.protocol.events import Started
from pipeline.record.recorder import Recorder
from pipeline.record.runs import data_of

HERE = "test_data"


def tensors(split: Any) -> tuple[Tensor, ...]:
    return split.tensors


# Digits and tables


def test_digits_are_those_of_scikit_learn_in_stated_types() -> None:
    """Which is asked where its files lie, and not imported."""
    pixels, labels = datasets.load_digits(return_X_y=True)
    train, validation = digits(value_range=(0, 16))
    images, own = (torch.cat(both) for both in zip(tensors(train), tensors(validation), strict=True))
    assert sorted(zip(images.flatten(1).tolist(), own.tolist(), strict=True)) == sorted(
        zip(pixels.tolist(), labels.tolist(), strict=True)
    )
    assert len(tensors(validation)[1]) == 359
    image, label = train[0]
    assert (image.shape, image.dtype, label.shape, label.dtype) == ((1, 8, 8), torch.float32, (), torch.int64)


@pytest.mark.parametrize(
    ("table", "load"), [("breast_cancer", "load_breast_cancer"), ("wine", "load_wine"), ("iris", "load_iris")]
)
def test_tables_are_those_of_scikit_learn_in_three_sets(table: str, load: str) -> None:
    rows, classes = getattr(datasets, load)(return_X_y=True)
    sets = tabular(table=table)
    features, own = (torch.cat(column) for column in zip(*map(tensors, sets), strict=True))
    assert (features.dtype, own.dtype) == (torch.float32, torch.int64)
    assert own.bincount().tolist() == torch.from_numpy(classes).bincount().tolist()
    assert features.shape == rows.shape
    spread = torch.corrcoef(features.double().T), torch.corrcoef(torch.from_numpy(rows).T)
    torch.testing.assert_close(*spread, atol=1e-4, rtol=0)


@pytest.mark.parametrize("make", [digits, tabular])
def test_the_training_set_is_standardized_and_each_class_has_its_share(make: Any) -> None:
    train, validation, *_ = make(validation_fraction=0.2)
    inputs, labels = tensors(train)
    assert inputs.mean().item() == pytest.approx(0, abs=1e-5)
    assert inputs.std().item() == pytest.approx(1, abs=2e-3)
    held_out = tensors(validation)[1].bincount()
    share = held_out / (labels.bincount() + held_out) / (0.2 if make is digits else 0.25)
    assert ((share - 1).abs() < 0.03).all()


@pytest.mark.parametrize("make", [digits, tabular])
def test_a_split_depends_on_its_seed_alone(make: Any) -> None:
    before = torch.get_rng_state()
    (_, first, *_), (_, second, *_), (_, other, *_) = make(seed=1), make(seed=1), make(seed=2)
    assert all(map(torch.equal, tensors(first), tensors(second)))
    assert not torch.equal(tensors(first)[0], tensors(other)[0])
    assert torch.equal(torch.get_rng_state(), before)


def test_no_sample_is_in_two_parts() -> None:
    for sets in (digits(), tabular()):
        parts = [tensors(split)[0].flatten(1) for split in sets if split is not None]
        assert all(torch.cdist(one, parts[0]).min() > 0 for one in parts[1:])


def test_images_are_enlarged_and_channels_repeated() -> None:
    small, large = tensors(digits().train)[0], tensors(digits(image_size=32, channels=3).train)[0]
    assert large.shape[1:] == (3, 32, 32)
    assert torch.equal(large[:, 0], large[:, 2])
    torch.testing.assert_close(large[:, :1].mean((2, 3)), small.mean((2, 3)), atol=0.02, rtol=0)


# Characters


def text_of(tokens: Tensor) -> str:
    return "".join(map(chr, tokens.tolist()))


def test_targets_are_the_next_tokens_and_others_become_question_marks(tmp_path: Path) -> None:
    def of_text(text: str, **arguments: Any) -> Any:
        (tmp_path / "text.txt").write_text(text, encoding="utf-8")
        return characters(source=str(tmp_path / "text.txt"), validation_fraction=0, **arguments)

    train, validation = of_text("abcdefghijk", context_length=4)
    assert [tuple(map(text_of, train[index])) for index in range(2)] == [("abcd", "bcde"), ("efgh", "fghi")]
    assert (len(train), validation) == (2, None)
    assert text_of(of_text("na\u00efve \u2026", context_length=6)[0][0][1]) == "a?ve ?"


def test_pythons_own_text_is_sizeable_and_fits_the_vocabulary() -> None:
    train, validation = characters()
    tokens, following = train[0]
    assert tokens.shape == following.shape == (64,)
    assert tokens.dtype == following.dtype == torch.int64
    inputs = tensors(train)[0]
    assert len(inputs) > 4000
    assert len(tensors(validation)[0]) > 400
    assert inputs.max() < VOCABULARY_SIZE
    assert "Python" in text_of(inputs.flatten())
    short = characters(context_length=10, max_characters=1001, validation_fraction=0.5)
    assert [len(tensors(split)[0]) for split in short] == [50, 49]


# Arrays and tokens in their files

INPUTS = np.arange(60, dtype=np.float32).reshape(10, 3, 2)
PAIR = {"inputs": "x.npy", "targets": "y.npy"}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.usefixtures("files")
class TestMapped:
    def test_a_batch_is_what_numpy_would_index(self) -> None:
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

    def test_relative_paths_begin_where_the_command_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sets: Any = arrays(**PAIR, validation_inputs="x.npy", validation_targets="y.npy")
        monkeypatch.chdir("/")  # as a worker's may be
        sent = pickle.dumps(sets.train)
        assert len(pickle.loads(sent)) == len(sets.validation) == 10
        assert INPUTS.tobytes() not in sent, "the other process maps the file"

    def test_tables_are_read_a_batch_at_a_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """And sample by sample for a collate of the user's."""
        train, read = arrays(**PAIR)[0], list[Any]()
        monkeypatch.setattr(type(train), "batch", lambda self, indices: read.append(indices) or (torch.zeros(2),) * 2)
        for collate, expected in ((None, [[7, 3]]), (list, [[7], [3]])):
            reader = loader(train, collate=collate)
            read.clear()
            list(reader.batches([part(7, 3)]))
            assert read == expected

    def test_windows_of_tokens_go_on_in_the_next_file(self) -> None:
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


# Errors

FRACTION = r"data\.validation_fraction: is {}; write a number from 0 \(no validation\) to less than 1"
WINDOWS = {"train": "a.bin", "length": 3}


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        *((make, {"validation_fraction": 1.0}, FRACTION.format(1.0)) for make in (digits, tabular, characters)),
        (digits, {"validation_fraction": -0.1}, FRACTION.format(-0.1)),
        (digits, {"image_size": 0}, r"data: 1 x 0 x 0 is not an image size"),
        (tabular, {"table": "titanic"}, r"data\.table: is 'titanic'; write one of breast_cancer, wine, iris"),
        (tabular, {"test_fraction": 1.5}, r"data\.test_fraction: is 1\.5; write a number from 0 \(none\) to less than"),
        (tabular, {"test_fraction": 0.5, "validation_fraction": 0.5}, r"data\.test_fraction: is 0\.5, and .* No rows"),
        (characters, {"max_characters": 64, "validation_fraction": 0}, r"is 64, but the text has 64 characters; write"),
        (characters, {"source": "nowhere.txt"}, r"data\.source: can't read nowhere\.txt as UTF-8"),
        *(
            (arrays, {**PAIR, **changes}, rf"data\.{said}")
            for changes, said in (
                ({"inputs": "nowhere.npy"}, r"inputs: can't read nowhere\.npy \(No such file"),
                ({"inputs": "text.npy"}, r"inputs: text\.npy can't be mapped \(.*\); write it with numpy\.save"),
                ({"inputs": "raw.bin"}, r"inputs: raw\.bin can't be mapped \(only \.npy files store their dtype\)"),
                ({"inputs": "one.npy"}, r"inputs: one\.npy can't be mapped \(it holds a single value"),
                ({"inputs": "names.npy"}, r"inputs: names\.npy can't be mapped \(.*numpy\.str_"),
                ({"inputs": "objects.npy"}, r"inputs: objects\.npy can't be mapped \(.*(allow_pickle|objects)"),
                ({"targets": "short.npy"}, r"targets: short\.npy has 9 rows, but x\.npy has 10"),
                ({"validation_inputs": "x.npy"}, r"validation_targets: missing; validation needs both"),
            )
        ),
        *(
            (tokens, {**WINDOWS, **changes}, rf"data\.{said}")
            for changes, said in (
                ({"train": "nowhere.bin"}, r"train: can't read nowhere\.bin"),
                ({"train": "odd.bin"}, r".*odd\.bin can't be mapped \(its 3 bytes are not a multiple .* of uint16\)"),
                ({"train": "empty.bin"}, r"train: empty\.bin can't be mapped"),
                ({"train": "x.npy"}, r"train: x\.npy holds float32 of shape \(10, 3, 2\); it must be one-dimensional"),
                ({"length": 11}, r"train: a\.bin has 11 tokens, but a window of 11 needs 12"),
                ({"length": 0}, r"length: is 0"),
                ({"dtype": "float32"}, r"dtype: is float32; choose one of uint8, uint16"),
            )
        ),
    ],
)  # fmt: skip
def test_impossible_arguments_and_unusable_files_are_named(make: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        make(**arguments)


# Versions


class Sets(tuple[Any, ...]):
    """What a data function may return."""

    version: str


def versioned(version: Any = "", of_tuple: str = "") -> tuple[Any, ...]:
    train_set, validation = toys.regression()
    if version:
        train_set.version = version  # type: ignore[attr-defined]
    sets = Sets((train_set, validation))
    if of_tuple:
        sets.version = of_tuple
    return sets


@pytest.mark.parametrize(
    ("arguments", "version"),
    [
        ({"version": "v3"}, "v3"),
        ({"version": "v3", "of_tuple": "9f2c"}, "9f2c"),
        ({"version": 3}, ""),  # of something else
        ({}, ""),
    ],
)
def test_the_version_is_recorded(arguments: dict[str, Any], version: str) -> None:
    outbox = run("", data={"_target_": f"{HERE}.versioned", **arguments})
    (started,) = (event for event in outbox.events if isinstance(event, Started))
    assert started.data_version == version


def test_the_commands_find_it(tmp_path: Path) -> None:
    event = Started(
        time=1, total_steps=1, steps_per_epoch=1, epochs=1, train_samples=1, epoch_samples=1,
        validation_samples=0, parameters=1,
        devices=(), data_name="lab.points", data_digest="abc", data_version="v3",
    )  # fmt: skip
    with closing(Recorder(tmp_path, subscribers=[])) as recorder:
        recorder.receive(event)
        recorder.receive(event.model_copy(update={"trial": "baseline", "data_digest": "", "data_version": ""}))
    assert data_of(tmp_path) == {"data digest": "abc", "data version": "v3"}
