"""Answers of a trained model for new texts.

python -m {{ cookiecutter.__package_name }}.predict "A text" "Another text"
"""

import argparse
import sys
from collections.abc import Sequence

import torch
from pipeline import Trained
from pipeline.errors import PipelineError

from {{ cookiecutter.__package_name }}.data import CLASSES, encode


def predict(trained: Trained, texts: Sequence[str]) -> list[tuple[str, float]]:
    """Return the most probable class of each text, and its probability."""
    data = trained.experiment.arguments("data")
    settings = {name: data[name] for name in ("tokenizer", "max_length")}
    inputs = encode(texts, **settings, padding=True, return_tensors="pt")
    with torch.no_grad():
        best = trained.model.float()(**inputs).logits.softmax(dim=1).max(dim=1)
    return list(zip([CLASSES[label] for label in best.indices], best.values.tolist(), strict=True))


def main() -> None:
    """Print the answers of a run's model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("texts", nargs="+", help="texts to classify")
    parser.add_argument("--run", default="latest", help="part of a run's id, or its folder; default: the latest run")
    arguments = parser.parse_args()
    try:
        trained = Trained.load(arguments.run)
        answers = predict(trained, arguments.texts)
        print(f"answers of {trained.folder}:", file=sys.stderr)
        for text, (name, probability) in zip(arguments.texts, answers, strict=True):
            print(f"{text}: {name} ({probability:.0%})")
    except (OSError, ValueError, PipelineError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
