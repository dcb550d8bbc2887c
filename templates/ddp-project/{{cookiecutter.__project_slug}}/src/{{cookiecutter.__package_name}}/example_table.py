"""An example table, to train on until you have your own."""

import csv
{%- if cookiecutter.data == "table_classes" %}
import random
{%- endif %}
from pathlib import Path

from pipeline.data import make_once
{% if cookiecutter.data == "table_classes" -%}
from sklearn.datasets import load_wine

from {{ cookiecutter.__package_name }}.data import CLASSES, COLUMNS, TARGET


def example_table(path: str) -> str:
    """Return the path of a table; write the analyses of 178 wines of three grapes there if it does not exist."""
    make_once(Path(path), _write, what="an example table of 178 wines")
    return path


def _write(path: Path) -> None:
    wines = load_wine()
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow([*COLUMNS, TARGET])
        for number in random.Random(0).sample(range(len(wines.target)), len(wines.target)):
            rows.writerow([*wines.data[number], CLASSES[wines.target[number]]])
{%- else -%}
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
{%- endif %}
