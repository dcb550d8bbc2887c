"""A small network, and handwritten digits."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset


class Digits(Dataset):
    def __init__(self, images, targets, augment=False):
        self.images, self.targets, self.augment = images, targets, augment

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if self.augment:  # move the digit by up to one pixel
            image = image.roll(torch.randint(-1, 2, (2,)).tolist(), dims=(1, 2))
        return image, self.targets[index]


def data():
    """Return a training and a validation set."""
    pixels, classes = load_digits(return_X_y=True)
    pictures = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    classes = torch.tensor(classes)
    return Digits(pictures[:1438], classes[:1438], augment=True), Digits(pictures[1438:], classes[1438:])


def net(width=32):
    layers = nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * width, 10)
    return nn.Sequential(*layers)
