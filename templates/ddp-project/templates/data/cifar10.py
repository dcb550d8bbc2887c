"""The data: CIFAR-10 (Krizhevsky 2009), 60 000 images of ten classes.

Replace it with your own: any function that returns a training and a validation dataset (map-style, of pairs of inputs
and target) can be used as `data:` in `experiments/*.yaml`, with its keyword arguments. It is called once in each worker
and must return the same data in all of them.
"""

import hashlib
import tarfile
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import torch
from PIL import Image
from pipeline.data import make_once
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_ADDRESS = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"  # as the dataset's home page states it
_MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)  # of the training images' red, green, blue
_DEVIATION = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)
_PADDING = 4


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Images of some files, stored as bytes: a quarter of the size of floats."""

    def __init__(self, files: list[Path], *, augment: bool, limit: int | None) -> None:
        records = np.concatenate([np.fromfile(file, dtype=np.uint8) for file in files]).reshape(-1, 3073)[:limit]
        self.targets = torch.from_numpy(records[:, 0].astype(np.int64))
        self.images = torch.from_numpy(records[:, 1:]).view(-1, 3, 32, 32)  # red, green, blue, each row by row
        self.augment = augment

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """The image, float32 of (3, 32, 32), standardized by channel, and its label, int64 from 0 to 9."""
        image = standardize(self.images[index])
        return (crop_and_flip(image) if self.augment else image), self.targets[index]


def standardize(pixels: Tensor) -> Tensor:
    """Scale bytes to mean 0 and deviation 1 of each channel of the training images."""
    return (pixels / 255 - _MEAN) / _DEVIATION


def crop_and_flip(image: Tensor) -> Tensor:
    """Crop and flip at random. Randomness belongs to a sample and an epoch, not to a worker."""
    top, left = torch.randint(2 * _PADDING + 1, (2,)).tolist()
    cropped = functional.pad(image, (_PADDING,) * 4)[:, top : top + 32, left : left + 32]
    return cropped.flip(-1) if torch.rand(()) < 0.5 else cropped


def cifar10(*, directory: str = ".data", augment: bool = True, limit: int | None = None) -> tuple[Images, Images]:
    """Training and validation images.

    Args:
        directory: holds the folder cifar-10-batches-bin (the binary version), or receives it from a download of 170 MB.
        augment: crop and flip training images at random.
        limit: use only this many samples, a fifth of them for validation.
    """
    folder = Path(directory) / "cifar-10-batches-bin"
    make_once(folder, _download, what="it from a download of CIFAR-10 (170 MB)")
    held_out = None if limit is None else limit // 5
    train = [folder / f"data_batch_{number}.bin" for number in range(1, 6)]
    return (
        Images(train, augment=augment, limit=None if limit is None or held_out is None else limit - held_out),
        Images([folder / "test_batch.bin"], augment=False, limit=held_out),
    )


def _download(folder: Path) -> None:
    archive = folder.with_name("archive.tar.gz")
    with urlopen(_ADDRESS, timeout=60) as response:
        archive.write_bytes(response.read())
    if hashlib.md5(archive.read_bytes(), usedforsecurity=False).hexdigest() != _MD5:
        raise OSError(f"{_ADDRESS} is not the archive of CIFAR-10, or is incomplete")
    with tarfile.open(archive) as tar:
        tar.extractall(folder.parent, filter="data")  # makes the folder, which has the same name there


def prepare(image: Image.Image) -> Tensor:
    """Turn a new image into an input of the model, like those of `cifar10`."""
    pixels = np.array(image.convert("RGB").resize((32, 32)))
    return standardize(torch.from_numpy(pixels).permute(2, 0, 1))
