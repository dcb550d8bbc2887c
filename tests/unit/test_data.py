"""The datasets that the package brings along."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn import datasets
from torch import Tensor

from pipeline.data import characters, digits, tabular
from pipeline.data.text import VOCABULARY_SIZE
from pipeline.errors import ExperimentError


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
    ("table", "load"),
    [("breast_cancer", "load_breast_cancer"), ("wine", "load_wine"), ("iris", "load_iris")],
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


def of_text(folder: Path, text: str, **arguments: Any) -> Any:
    (folder / "text.txt").write_text(text, encoding="utf-8")
    return characters(source=str(folder / "text.txt"), **{"validation_fraction": 0, **arguments})


def test_targets_are_the_next_tokens_and_others_become_question_marks(tmp_path: Path) -> None:
    train, validation = of_text(tmp_path, "abcdefghijk", context_length=4)
    assert [tuple(map(text_of, train[index])) for index in range(2)] == [("abcd", "bcde"), ("efgh", "fghi")]
    assert (len(train), validation) == (2, None)
    assert text_of(of_text(tmp_path, "na\u00efve \u2026", context_length=6)[0][0][1]) == "a?ve ?"


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


FRACTION = r"data\.validation_fraction: is {}; write a number from 0 \(no validation\) to less than 1"


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
    ],
)
def test_impossible_arguments_are_refused(make: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        make(**arguments)
