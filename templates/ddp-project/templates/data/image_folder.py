"""The data: images in a folder for each class, `data/images/<class>/<any name>.png` or .jpg.

Replace it with your own: any function that returns a training and a validation dataset (map-style, of pairs of inputs
and target) can be used as `data:` in `experiments/*.yaml`, with its keyword arguments. It is called once in each worker
and must return the same data in all of them.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

_ENDINGS = {".bmp", ".jpeg", ".jpg", ".png", ".webp"}
_EVERY = 5  # of five images, one is for validation


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Images that are read on access; files are (path, label)."""

    def __init__(self, files: Sequence[tuple[Path, int]], *, image_size: int) -> None:
        self.files = files
        self.image_size = image_size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """The image, float32 of (3, image_size, image_size) from -1 to 1, and its label, int64."""
        path, label = self.files[index]
        with Image.open(path) as image:
            pixels = np.array(image.convert("RGB").resize((self.image_size, self.image_size)))
        return torch.from_numpy(pixels).permute(2, 0, 1) / 127.5 - 1, torch.tensor(label)


def image_folder(
    *, directory: str = "data/images", image_size: int = 32, limit: int | None = None
) -> tuple[Images, Images]:
    """Training and validation images; classes are numbered in the order of their folders' names.

    Args:
        directory: holds one folder for each class.
        image_size: height and width that images are resized to.
        limit: use only this many images, training and validation together, evenly spread.

    Raises:
        FileNotFoundError: there are no images.
    """
    folders = sorted(path for path in Path(directory).glob("*") if path.is_dir())
    files = [
        (path, label)
        for label, folder in enumerate(folders)
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in _ENDINGS
    ]
    if not files:
        raise FileNotFoundError(f"no images in {directory}/<class>/; put yours there, or run `make data` for examples")
    files = files[:: -(-len(files) // limit)] if limit else files
    train = [file for number, file in enumerate(files) if number % _EVERY]
    return Images(train, image_size=image_size), Images(files[::_EVERY], image_size=image_size)
