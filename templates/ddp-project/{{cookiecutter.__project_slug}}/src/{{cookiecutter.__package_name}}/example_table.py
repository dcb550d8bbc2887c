"""An example table, to train on until you have your own."""

import csv
from pathlib import Path

from pipeline.data import make_once
from sklearn.datasets import load_diabetes

from {{ cookiecutter.__package_name }}.data import COLUMNS, TARGET


def example_table(path: str) -> str:
    """Return the path of a table; write blood values of 442 patients with diabetes there if it does not exist."""
    make_once(Path(path), _write, what="an example table of 442 patients")
    return path


def _write(path: Path) -> None:
    patients = load_diabetes(scaled=False)
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow([*COLUMNS, *TARGET])
        rows.writerows([*numbers, target] for numbers, target in zip(patients.data, patients.target, strict=True))
