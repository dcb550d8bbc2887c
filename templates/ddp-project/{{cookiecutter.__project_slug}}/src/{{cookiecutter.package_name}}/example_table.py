"""Write an example table, to train on until you have your own.

python -m {{ cookiecutter.package_name }}.example_table data/table.csv
"""

import argparse
import csv
{%- if cookiecutter.data == "table_classes" %}
import random
{%- endif %}
from pathlib import Path
{% if cookiecutter.data == "table_classes" %}
from sklearn.datasets import load_wine

from {{ cookiecutter.package_name }}.data import CLASSES, COLUMNS, TARGET


def write(path: Path) -> int:
    """Write the analyses of 178 wines of three grapes in random order; returns the number of rows."""
    wines = load_wine()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow([*COLUMNS, TARGET])
        for number in random.Random(0).sample(range(len(wines.target)), len(wines.target)):
            rows.writerow([*wines.data[number], CLASSES[wines.target[number]]])
    return len(wines.target)
{%- else %}
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
{%- endif %}


def main() -> None:
    """Write to the file that the command line names."""
    parser = argparse.ArgumentParser(description=write.__doc__)
    parser.add_argument("path", type=Path)
    path = parser.parse_args().path
    print(f"{write(path)} example rows are in {path}; replace them with yours")


if __name__ == "__main__":
    main()
