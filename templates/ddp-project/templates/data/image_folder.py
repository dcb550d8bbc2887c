"""The data: images in a folder for each class, `data/images/<class>/<any name>.png` or .jpg.

Replace it with your own: any function that returns a training and a validation dataset can be `data:` in an
experiment, with its keyword arguments. Each worker calls it and must get the same data.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from pipeline.data import make_once
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import Dataset

_ENDINGS = {".bmp", ".jpeg", ".jpg", ".png", ".webp"}
_EVERY = 5  # of five images, one is for validation


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Images that are read on access; files are (path, label)."""

    def __init__(self, files: Sequence[tuple[Path, int]], *, image_size: int) -> None:
        self.files = files
        self.targets = [label for _, label in files]  # for pipeline.data.balanced, a sampler
        self.image_size = image_size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """The image, float32 of (3, image_size, image_size) from -1 to 1, and its label, int64."""
        path, label = self.files[index]
        with Image.open(path) as image:
            return prepare(image, image_size=self.image_size), torch.tensor(label)


def prepare(image: Image.Image, *, image_size: int) -> Tensor:
    """Turn an image into an input of the model, in training and for new images."""
    pixels = np.array(image.convert("RGB").resize((image_size, image_size)))
    return torch.from_numpy(pixels).permute(2, 0, 1) / 127.5 - 1


def image_folder(
    classes: Sequence[str], *, directory: str = "data/images", image_size: int = 32, limit: int | None = None
) -> tuple[Images, Images]:
    """Training and validation images.

    Args:
        classes: names of the folders, in the order of the model's outputs; other folders are left out.
        directory: holds one folder for each class.
        image_size: height and width that images are resized to.
        limit: use only this many images, training and validation together, evenly spread.

    Raises:
        FileNotFoundError: a class has no images.
    """
    files = [(path, label) for label, name in enumerate(classes) for path in _images_in(Path(directory) / name)]
    files = files[:: -(-len(files) // limit)] if limit else files
    train = [file for number, file in enumerate(files) if number % _EVERY]
    return Images(train, image_size=image_size), Images(files[::_EVERY], image_size=image_size)


def _images_in(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _ENDINGS)
    if not found:
        raise FileNotFoundError(f"no images in {folder}; put yours there")
    return found


def example_images(directory: str) -> str:
    """Return a folder of images; write handwritten digits there, `<digit>/<number>.png`, if it does not exist."""
    make_once(Path(directory), _write_digits, what="1797 example images")
    return directory


def _write_digits(directory: Path) -> None:
    scans = load_digits()
    for number, (scan, label) in enumerate(zip(scans.images, scans.target, strict=True)):
        folder = directory / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((scan / 16 * 255).astype(np.uint8)).resize((32, 32)).save(folder / f"{number:04}.png")
