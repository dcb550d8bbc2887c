"""Answers of a trained model for new images.

python -m {{ cookiecutter.__package_name }}.predict image.png
"""

import argparse
import sys
from collections.abc import Sequence

import torch
from PIL import Image
from pipeline import Trained
from pipeline.errors import PipelineError

from {{ cookiecutter.__package_name }}.data import {{ "" if cookiecutter.data == "image_folder" else "CLASSES, " }}prepare


def predict(trained: Trained, images: Sequence[Image.Image]) -> list[tuple[str, float]]:
    """Return the most probable class of each image, and its probability."""
    data = trained.experiment.arguments("data")
    inputs = torch.stack([prepare(image, image_size=data["image_size"]) for image in images])
    with torch.no_grad():
        best = trained.model.float()(inputs).softmax(dim=1).max(dim=1)
    names = [{{ 'data["classes"]' if cookiecutter.data == "image_folder" else "CLASSES" }}[label] for label in best.indices]
    return list(zip(names, best.values.tolist(), strict=True))


def main() -> None:
    """Print the answers of a run's model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("images", nargs="+", help="image files")
    parser.add_argument("--run", default="latest", help="part of a run's id, or its folder; default: the latest run")
    arguments = parser.parse_args()
    try:
        trained = Trained.load(arguments.run)
        answers = predict(trained, [Image.open(path) for path in arguments.images])
        print(f"answers of {trained.folder}:", file=sys.stderr)
        for path, (name, probability) in zip(arguments.images, answers, strict=True):
            print(f"{path}: {name} ({probability:.0%})")
    except (OSError, ValueError, PipelineError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
