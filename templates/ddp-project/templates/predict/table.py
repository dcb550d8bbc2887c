"""Prediction of the target of new rows of a table.

python -m {{ cookiecutter.__package_name }}.predict new.csv > predicted.csv
"""

import argparse
import sys
from pathlib import Path

import torch
from pipeline import Trained
from pipeline.errors import PipelineError

from {{ cookiecutter.__package_name }}.data import COLUMNS, TARGET, read, unscaled


def predict(trained: Trained, path: str | Path) -> list[list[float]]:
    """Return the targets of each row of a CSV file, in the units of the table in training."""
    with torch.no_grad():
        targets: list[list[float]] = unscaled(trained.model.float()(read(path, COLUMNS))).tolist()
    return targets


def describe(trained: Trained, path: str) -> str:
    """Return the predictions for a CSV file as CSV."""
    return "\n".join(",".join(map(str, row)) for row in (TARGET, *predict(trained, path)))
