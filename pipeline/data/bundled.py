"""Small real data that needs no download: tables and images that are installed with scikit-learn, and a text.

digits: the test set of Alpaydin and Kaynak 1998, "Optical Recognition of Handwritten Digits", doi 10.24432/C50P49.
breast_cancer: Wolberg et al. 1993, "Breast Cancer Wisconsin (Diagnostic)", doi 10.24432/C5DW2B. wine: Aeberhard and
Forina 1992, doi 10.24432/C5PC7J. iris: Fisher 1936, doi 10.24432/C56C76.
"""

import importlib.util
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import TensorDataset

from pipeline.data.splits import Pairs, Splits, check_fraction, stratified
from pipeline.errors import ExperimentError

_FILES = {"breast_cancer": "breast_cancer.csv", "wine": "wine_data.csv", "iris": "iris.csv"}
"""Files of scikit-learn by name of the table."""
_BRIGHTEST = 16  # a pixel is the number of dark ones in a 4x4 square of the scan


class ThreeSets(NamedTuple):
    """Training, validation and test dataset, all map-style."""

    train: Pairs
    validation: Pairs | None
    test: Pairs | None


def digits(
    *,
    image_size: int = 8,
    channels: int = 1,
    validation_fraction: float = 0.2,
    seed: int = 0,
    value_range: tuple[float, float] | None = None,
) -> Splits:
    """Return 1797 handwritten digits as pairs (image, label).

    Images are float32 of shape (channels, image_size, image_size), labels int64. Images are enlarged bilinearly from
    8x8. The validation set is a random part of each class.

    Args:
        image_size: height and width of the images.
        channels: number of channels, which are all equal.
        validation_fraction: part of the digits to validate on; 0 for none.
        seed: seed of the split.
        value_range: values of white and of black. None: mean 0 and standard deviation 1 over the training set.

    Raises:
        ExperimentError: a size is less than 1, or the fraction is not in [0, 1).
    """
    check_fraction(validation_fraction)
    if image_size < 1 or channels < 1:
        size = f"{channels} x {image_size} x {image_size}"
        raise ExperimentError.of("data", f"{size} is not an image size; write numbers of at least 1")
    table = torch.from_numpy(_read("digits.csv.gz", dtype=np.uint8))
    images, labels = table[:, :-1].to(torch.float32).view(-1, 1, 8, 8) / _BRIGHTEST, table[:, -1].to(torch.int64)
    train, validation = stratified(labels, fraction=validation_fraction, seed=seed)
    if value_range is None:
        images = (images - images[train].mean()) / images[train].std()
    else:
        images = value_range[0] + images * (value_range[1] - value_range[0])
    if image_size != images.shape[-1]:
        images = functional.interpolate(images, size=(image_size, image_size), mode="bilinear", align_corners=False)
    images = images.expand(-1, channels, -1, -1)
    held_out = TensorDataset(images[validation], labels[validation]) if len(validation) else None
    return Splits(TensorDataset(images[train], labels[train]), held_out)


def tabular(
    *, table: str = "breast_cancer", validation_fraction: float = 0.2, test_fraction: float = 0.2, seed: int = 0
) -> ThreeSets:
    """Return rows of a table as pairs (features, class).

    Features are float32 of shape (features,), with mean 0 and standard deviation 1 over the training set. Classes are
    int64. Validation and test set are random parts of each class.

    Args:
        table: breast_cancer (569 rows, 30 features, 2 classes), wine (178, 13, 3) or iris (150, 4, 3).
        validation_fraction: part of the rows to validate on; 0 for none.
        test_fraction: part of the rows to test on, once, at the end; 0 for none.
        seed: seed of the split.

    Raises:
        ExperimentError: the table is unknown, a fraction is not in [0, 1), or no rows are left to train on.
    """
    check_fraction(validation_fraction)
    check_fraction(test_fraction, key="data.test_fraction")
    if validation_fraction + test_fraction >= 1:
        message = (
            f"is {test_fraction}, and data.validation_fraction is {validation_fraction}. No rows are left to train "
            "on. Make their sum less than 1."
        )
        raise ExperimentError.of("data.test_fraction", message)
    if table not in _FILES:
        raise ExperimentError.of("data.table", f"is {table!r}; write one of {', '.join(_FILES)}")
    values = torch.from_numpy(_read(_FILES[table], skiprows=1))  # a head with the sizes
    features, classes = values[:, :-1].to(torch.float32), values[:, -1].to(torch.int64)
    rest, test = stratified(classes, fraction=test_fraction, seed=seed)
    share = validation_fraction / (1 - test_fraction)
    train, validation = (rest[part] for part in stratified(classes[rest], fraction=share, seed=seed))
    features = (features - features[train].mean(0)) / features[train].std(0)

    def pairs(rows: Tensor) -> TensorDataset:
        return TensorDataset(features[rows], classes[rows])

    return ThreeSets(pairs(train), pairs(validation) if len(validation) else None, pairs(test) if len(test) else None)


def _read(name: str, **options: Any) -> np.ndarray[Any, Any]:
    """Read a file of scikit-learn, whose own loaders would import all of it, over a second in each rank."""
    package = importlib.util.find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    return np.loadtxt(Path(package.origin).parent / "datasets" / "data" / name, delimiter=",", **options)


VOCABULARY_SIZE: Final = 128  # Number of ASCII codes, which are the tokens; other characters become "?"


def characters(
    *,
    context_length: int = 64,
    source: str | None = None,
    max_characters: int | None = None,
    validation_fraction: float = 0.1,
) -> Splits:
    """Return windows of a text as pairs (tokens, next_tokens), a token for each character.

    Both are int64 of shape (context_length,) with values below 128. Windows overlap only in the last next token. A
    remainder at the end is not used.

    Args:
        context_length: tokens in a window.
        source: UTF-8 text file. Default: the topics of Python's help(), about 450,000 characters of English, the same
            on all machines with the same Python version.
        max_characters: use only this many characters from the start of the text.
        validation_fraction: part of the text to validate on, taken from its end; 0 for none.

    Raises:
        ExperimentError: the source can't be read, or is too short for a window.
    """
    check_fraction(validation_fraction)
    if source is None:
        from pydoc_data.topics import topics  # half a megabyte of source, loaded only if used

        text = "\n".join(topics[name] for name in sorted(topics))
    else:
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            message = f"can't read {source} as UTF-8 text ({error}); name another file"
            raise ExperimentError.of("data.source", message) from error
    tokens = torch.tensor(list(text.encode("ascii", errors="replace")), dtype=torch.int64)[:max_characters]
    cut = len(tokens) - round(validation_fraction * len(tokens))
    held_out = _windows(tokens[cut:], length=context_length) if validation_fraction else None
    return Splits(_windows(tokens[:cut], length=context_length), held_out)


def _windows(tokens: Tensor, *, length: int) -> TensorDataset:
    if length < 1 or len(tokens) <= length:
        most = max(1, len(tokens) - 1)
        message = f"is {length}, but the text has {len(tokens)} characters; write a number from 1 to {most}"
        raise ExperimentError.of("data.context_length", message)
    used = (len(tokens) - 1) // length * length
    return TensorDataset(tokens[:used].view(-1, length), tokens[1 : used + 1].view(-1, length))
