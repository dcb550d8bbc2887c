"""Small real tables that need no download: they are installed with scikit-learn.

breast_cancer: Wolberg et al. 1993, "Breast Cancer Wisconsin (Diagnostic)", doi 10.24432/C5DW2B. wine: Aeberhard and
Forina 1992, doi 10.24432/C5PC7J. iris: Fisher 1936, doi 10.24432/C56C76.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from pipeline.data.splits import Pairs, bundled, check_fraction, stratified
from pipeline.errors import ExperimentError

FILES = {"breast_cancer": "breast_cancer.csv", "wine": "wine_data.csv", "iris": "iris.csv"}
"""Files of scikit-learn by name of the table."""


class ThreeSets(NamedTuple):
    """Training, validation and test dataset, all map-style."""

    train: Pairs
    validation: Pairs | None
    test: Pairs | None


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
    features, classes = _load(table)
    rest, test = stratified(classes, fraction=test_fraction, seed=seed)
    share = validation_fraction / (1 - test_fraction)
    train, validation = (rest[part] for part in stratified(classes[rest], fraction=share, seed=seed))
    features = (features - features[train].mean(0)) / features[train].std(0)

    def pairs(rows: Tensor) -> TensorDataset:
        return TensorDataset(features[rows], classes[rows])

    return ThreeSets(pairs(train), pairs(validation) if len(validation) else None, pairs(test) if len(test) else None)


def _load(table: str) -> tuple[Tensor, Tensor]:
    """Read features of shape (rows, features), float32, and classes of shape (rows,), int64."""
    if table not in FILES:
        raise ExperimentError.of("data.table", f"is {table!r}; write one of {', '.join(FILES)}")
    values = torch.from_numpy(np.loadtxt(bundled(FILES[table]), delimiter=",", skiprows=1))  # a head with the sizes
    return values[:, :-1].to(torch.float32), values[:, -1].to(torch.int64)
