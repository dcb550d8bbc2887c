"""Example images, to train on until you have your own."""

from pathlib import Path

import numpy as np
from PIL import Image
from pipeline.data import make_once
from sklearn.datasets import load_digits


def example_images(directory: str) -> str:
    """Return the folder of images; write handwritten digits there, `<digit>/<number>.png`, if it does not exist."""
    make_once(Path(directory), _write, what="1797 example images")
    return directory


def _write(directory: Path) -> None:
    scans = load_digits()
    for number, (scan, label) in enumerate(zip(scans.images, scans.target, strict=True)):
        folder = directory / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((scan / 16 * 255).astype(np.uint8)).resize((32, 32)).save(folder / f"{number:04}.png")
