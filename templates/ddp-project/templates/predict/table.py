"""Answers of a trained model for new rows of a table.

python -m {{ cookiecutter.__package_name }}.predict new.csv > answers.csv
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
        answers: list[list[float]] = unscaled(trained.model.float()(read(path, COLUMNS))).tolist()
    return answers


def main() -> None:
    """Print the answers of a run's model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("path", help="CSV file with the columns of the training's, without the target")
    parser.add_argument("--run", default="latest", help="part of a run's id, or its folder; default: the latest run")
    arguments = parser.parse_args()
    try:
        trained = Trained.load(arguments.run)
        answers = predict(trained, arguments.path)
        print(f"answers of {trained.folder}:", file=sys.stderr)
        for line in (TARGET, *answers):
            print(",".join(map(str, line)))
    except (OSError, ValueError, PipelineError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
