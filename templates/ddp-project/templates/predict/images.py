"""Prediction of the class of new images.

python -m {{ cookiecutter.__package_name }}.predict image.png
"""

import argparse
import sys

import torch
from PIL import Image
from pipeline import Trained
from pipeline.errors import PipelineError

from {{ cookiecutter.__package_name }}.data import {{ "" if cookiecutter.data == "image_folder" else "CLASSES, " }}prepare


def predict(trained: Trained, image: Image.Image) -> tuple[str, float]:
    """Return the most probable class of an image, and its probability."""
    data = trained.experiment.arguments("data")
    with torch.no_grad():
        outputs = trained.model.float()(prepare(image, image_size=data["image_size"])[None])
    probability, label = outputs.softmax(dim=1)[0].max(dim=0)
    return {{ 'data["classes"]' if cookiecutter.data == "image_folder" else "CLASSES" }}[label], probability.item()


def describe(trained: Trained, path: str) -> str:
    """Return the prediction for an image file in words."""
    name, probability = predict(trained, Image.open(path))
    return f"{path}: {name} ({probability:.0%})"
