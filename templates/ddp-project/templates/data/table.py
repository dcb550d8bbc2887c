"""The data: a table in a CSV file, a row for each sample, a column for each number.

The example predicts how far diabetes of 442 patients has progressed after a year (Efron et al. 2004, arXiv
math/0406456). For your own table, write its columns to `COLUMNS` and `TARGET`. This prints them as Python:

python -m {{ cookiecutter.__package_name }}.data data/table.csv

Or replace it: any function that returns a training and a validation dataset can be `data:` in an
experiment, with its keyword arguments. Each worker calls it and must get the same data.
"""

import csv
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from pipeline.data import make_once, read_csv
from sklearn.datasets import load_diabetes
from torch import Tensor
from torch.utils.data import TensorDataset

# Mean and deviation scale a column to numbers around 0. They belong to the trained model, so they stand here instead of
# being computed from a file that may get more rows.
COLUMNS = {
    "age": (48.5, 13.1),
    "sex": (1.5, 0.5),
    "body_mass_index": (26.4, 4.4),
    "blood_pressure": (94.6, 13.8),
    "cholesterol": (189.1, 34.6),
    "ldl": (115.4, 30.4),
    "hdl": (49.8, 12.9),
    "cholesterol_per_hdl": (4.1, 1.3),
    "log_triglycerides": (4.6, 0.5),
    "glucose": (91.3, 11.5),
}
TARGET = {"progression": (152.1, 77.0)}
_EVERY = 5  # of five rows, one is for validation


def table(*, path: str = "data/table.csv", limit: int | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Pairs of a row's numbers, float32 of (columns), and its target, float32 of (1), all scaled.

    Args:
        path: a CSV file with a header; columns that `COLUMNS` and `TARGET` don't name are left out.
        limit: use only this many rows, training and validation together.
    """
    inputs, targets = read(path, COLUMNS)[:limit], read(path, TARGET)[:limit]
    held_out = torch.arange(len(inputs)) % _EVERY == 0
    return TensorDataset(inputs[~held_out], targets[~held_out]), TensorDataset(inputs[held_out], targets[held_out])


def read(path: str | Path, columns: Mapping[str, tuple[float, float]]) -> Tensor:
    """Columns of a CSV file, scaled: float32 of (rows, columns).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a column is missing, a row has more or fewer fields than columns, or a value is not a number.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: there is no such table; put yours there")
    rows = read_csv(path, columns)
    numbers = [[_number(row[name], place=f"{path}:{line}: {name}") for name in columns] for line, row in rows]
    means, deviations = torch.tensor(list(columns.values())).unbind(1)
    return (torch.tensor(numbers).view(-1, len(columns)) - means) / deviations


def unscaled(outputs: Tensor) -> Tensor:
    """Targets that outputs of the model stand for, in the units of the table."""
    means, deviations = torch.tensor(list(TARGET.values())).unbind(1)
    return outputs * deviations + means


def _number(text: str, *, place: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{place} is {text!r}, not a number; fill it in, or remove the row") from None


def example_table(path: str) -> str:
    """Return the path of a table; write blood values of 442 patients with diabetes there if it does not exist."""
    make_once(Path(path), _write_patients, what="an example table of 442 patients")
    return path


def _write_patients(path: Path) -> None:
    patients = load_diabetes(scaled=False)
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow([*COLUMNS, *TARGET])
        rows.writerows([*numbers, target] for numbers, target in zip(patients.data, patients.target, strict=True))


def main(path: str = "data/table.csv") -> None:
    """Print the columns of a table with mean and deviation."""
    names = list(read_csv(path)[0].fields)
    for name, column in zip(names, read(path, dict.fromkeys(names, (0, 1))).T, strict=True):
        print(f'    "{name}": ({column.mean():.4g}, {column.std():.4g}),')


if __name__ == "__main__":
    main(*sys.argv[1:])
