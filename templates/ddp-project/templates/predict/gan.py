"""Images of a trained generator.

python -m {{ cookiecutter.__package_name }}.predict generated.png
"""

import argparse
import sys

import numpy as np
import torch
from PIL import Image
from pipeline import Trained
from pipeline.errors import PipelineError

_ROW = 8  # images side by side


def predict(trained: Trained, *, rows: int = 8, seed: int = 0) -> Image.Image:
    """Return generated images as one picture, eight in a row."""
    size = trained.experiment.arguments("data")["size"]
    noise = torch.randn(rows * _ROW, size, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        images = trained.model.float()(noise)  # (images, channels, height, width), from -1 to 1
    _, channels, height, width = images.shape
    table = images.view(rows, _ROW, channels, height, width).permute(0, 3, 1, 4, 2)
    pixels = table.reshape(rows * height, _ROW * width, channels)
    return Image.fromarray(((pixels.numpy() + 1) * 127.5).round().astype(np.uint8))


def main() -> None:
    """Write images of a run's generator to a file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("file", help="image file to write")
    parser.add_argument("--rows", type=int, default=8, help="rows of eight images; default: 8")
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise; another one gives other images")
    parser.add_argument("--run", default="latest", help="part of a run's id, or its folder; default: the latest run")
    arguments = parser.parse_args()
    try:
        trained = Trained.load(arguments.run)
        predict(trained, rows=arguments.rows, seed=arguments.seed).save(arguments.file)
        print(f"{arguments.file} has {arguments.rows * _ROW} images of {trained.folder}")
    except (OSError, ValueError, PipelineError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
