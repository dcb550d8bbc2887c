"""Similar images by the features of a trained encoder.

python -m {{ cookiecutter.__package_name }}.predict one.png another.png third.png
"""

import argparse
import sys
from collections.abc import Sequence

import torch
from PIL import Image
from pipeline import Trained
from pipeline.errors import PipelineError
from torch import Tensor

from {{ cookiecutter.__package_name }}.data import prepare


def features(trained: Trained, images: Sequence[Image.Image]) -> Tensor:
    """Return the features of each image, shape (images, features), of length 1."""
{%- if cookiecutter.data in ("digits", "image_folder") %}
    size = trained.experiment.arguments("data")["of"]["image_size"]
    inputs = torch.stack([prepare(image, image_size=size) for image in images])
{%- else %}
    inputs = torch.stack([prepare(image) for image in images])
{%- endif %}
    with torch.no_grad():
        found, _ = trained.model.float()(inputs)
    return torch.nn.functional.normalize(found, dim=1)


def predict(trained: Trained, images: Sequence[Image.Image]) -> list[tuple[int, float]]:
    """Return for each image the number of the most similar other one, and their cosine similarity from -1 to 1."""
    if len(images) < 2:
        raise ValueError("one image has no other to be similar to; name two or more")
    rows = features(trained, images)
    best = (rows @ rows.T).fill_diagonal_(-torch.inf).max(dim=1)
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def main() -> None:
    """Print the most similar other image of each image, by a run's model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("images", nargs="+", help="two or more image files")
    parser.add_argument("--run", default="latest", help="part of a run's id, or its folder; default: the latest run")
    arguments = parser.parse_args()
    try:
        trained = Trained.load(arguments.run)
        answers = predict(trained, [Image.open(path) for path in arguments.images])
        print(f"answers of {trained.folder}:", file=sys.stderr)
        for path, (other, similarity) in zip(arguments.images, answers, strict=True):
            print(f"{path}: {arguments.images[other]} ({similarity:.2f})")
    except (OSError, ValueError, PipelineError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
