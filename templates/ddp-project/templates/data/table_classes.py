"""The data: a table in a CSV file, a row for each sample, a column for each number, and one with its class.

The example tells the grape of 178 wines by their analysis (Aeberhard and Forina 1991, doi 10.24432/C5PC7J). For your
own table, write its columns to `COLUMNS`, `TARGET` and `CLASSES`. This prints them as Python:

python -m {{ cookiecutter.__package_name }}.data data/table.csv

Or replace it: any function that returns a training and a validation dataset (map-style, of pairs of inputs and target)
can be used as `data:` in `experiments/*.yaml`, with its keyword arguments. It is called once in each worker and must
return the same data in all of them.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from pipeline.data import read_csv
from torch import Tensor
from torch.utils.data import TensorDataset

# Mean and deviation scale a column to numbers around 0. They belong to the trained model, so they stand here instead of
# being computed from a file that may get more rows.
COLUMNS = {
    "alcohol": (13.0, 0.812),
    "malic_acid": (2.34, 1.12),
    "ash": (2.37, 0.274),
    "alcalinity_of_ash": (19.5, 3.34),
    "magnesium": (99.7, 14.3),
    "total_phenols": (2.3, 0.626),
    "flavanoids": (2.03, 0.999),
    "nonflavanoid_phenols": (0.362, 0.124),
    "proanthocyanins": (1.59, 0.572),
    "color_intensity": (5.06, 2.32),
    "hue": (0.957, 0.229),
    "od280_od315": (2.61, 0.71),
    "proline": (747, 315),
}
TARGET = "grape"
CLASSES = ("nebbiolo", "grignolino", "barbera")
_EVERY = 5  # of five rows, one is for validation


def table_classes(*, path: str = "data/table.csv", limit: int | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Pairs of a row's numbers, float32 of (columns), scaled, and the index of its class, int64.

    Args:
        path: a CSV file with a header; columns that `COLUMNS` and `TARGET` don't name are left out.
        limit: use only this many rows, training and validation together.
    """
    rows = _rows(path, (*COLUMNS, TARGET))
    for line, row in rows:
        if row[TARGET] not in CLASSES:
            known = ", ".join(CLASSES)
            raise ValueError(f"{path}:{line}: {TARGET} is {row[TARGET]!r}; CLASSES of data.py has {known}")
    targets = torch.tensor([CLASSES.index(row[TARGET]) for _, row in rows])[:limit]
    inputs = _scaled(path, rows)[:limit]
    held_out = torch.arange(len(inputs)) % _EVERY == 0
    return TensorDataset(inputs[~held_out], targets[~held_out]), TensorDataset(inputs[held_out], targets[held_out])


def read(path: str | Path) -> Tensor:
    """Numbers of a CSV file, scaled: float32 of (rows, columns).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a column is missing, a row has more or fewer fields than columns, or a value is not a number.
    """
    return _scaled(path, _rows(path, tuple(COLUMNS)))


def _rows(path: str | Path, names: tuple[str, ...]) -> Sequence[tuple[int, dict[str, str]]]:
    """Rows of a CSV file with their lines."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: there is no such table; put yours there")
    return read_csv(path, names)


def _scaled(path: str | Path, rows: Sequence[tuple[int, dict[str, str]]]) -> Tensor:
    numbers = [[_number(row[name], place=f"{path}:{line}: {name}") for name in COLUMNS] for line, row in rows]
    means, deviations = torch.tensor(list(COLUMNS.values())).unbind(1)
    return (torch.tensor(numbers).view(-1, len(COLUMNS)) - means) / deviations


def _number(text: str, *, place: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{place} is {text!r}, not a number; fill it in, or remove the row") from None


def main() -> None:
    """Print the columns of a table, with mean and deviation of numbers and the values of others."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("path")
    rows = [row for _, row in read_csv(parser.parse_args().path)]
    for name in rows[0]:
        try:
            column = torch.tensor([float(row[name]) for row in rows])
            print(f'    "{name}": ({column.mean():.4g}, {column.std():.4g}),')
        except ValueError:
            print(f"    # {name}: {tuple(sorted({row[name] for row in rows}))}")


if __name__ == "__main__":
    main()
