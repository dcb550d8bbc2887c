"""Write an example table, to train on until you have your own.

python -m {{ cookiecutter.package_name }}.example_table data/table.csv
"""

import argparse
import csv
from pathlib import Path

from sklearn.datasets import load_diabetes

from {{ cookiecutter.package_name }}.data import COLUMNS, TARGET


def write(path: Path) -> int:
    """Write age, blood values and progression of 442 patients with diabetes; returns the number of rows."""
    patients = load_diabetes(scaled=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow([*COLUMNS, *TARGET])
        rows.writerows([*numbers, target] for numbers, target in zip(patients.data, patients.target, strict=True))
    return len(patients.target)


def main() -> None:
    """Write to the file that the command line names."""
    parser = argparse.ArgumentParser(description=write.__doc__)
    parser.add_argument("path", type=Path)
    path = parser.parse_args().path
    print(f"{write(path)} example rows are in {path}; replace them with yours")


if __name__ == "__main__":
    main()
