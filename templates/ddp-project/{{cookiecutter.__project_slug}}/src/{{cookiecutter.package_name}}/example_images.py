"""Write example images, to train on until you have your own.

python -m {{ cookiecutter.package_name }}.example_images data/images
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits


def write(directory: Path) -> int:
    """Write 1797 handwritten digits as `<directory>/<digit>/<number>.png`; returns their number."""
    scans = load_digits()
    for number, (scan, label) in enumerate(zip(scans.images, scans.target, strict=True)):
        folder = directory / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((scan / 16 * 255).astype(np.uint8)).resize((32, 32)).save(folder / f"{number:04}.png")
    return len(scans.target)


def main() -> None:
    """Write to the folder that the command line names."""
    parser = argparse.ArgumentParser(description=write.__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    print(f"{write(directory)} example images are in {directory}; replace them with yours")


if __name__ == "__main__":
    main()
