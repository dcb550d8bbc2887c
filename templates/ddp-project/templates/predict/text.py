"""Continuation of a text by a trained model.

python -m {{ cookiecutter.__package_name }}.predict "The if statement"
"""

import argparse
import sys

import torch
from pipeline import Trained
from pipeline.errors import PipelineError

from {{ cookiecutter.__package_name }}.data import decode, encode


def predict(trained: Trained, text: str, *, characters: int = 200, seed: int = 0) -> str:
    """Return a text that continues another, drawn character by character from the model's probabilities."""
    if not text:
        raise ValueError("the text is empty; write its beginning")
    context_length = trained.experiment.arguments("data")["context_length"]
    model, generator = trained.model.float(), torch.Generator().manual_seed(seed)
    tokens = encode(text)
    with torch.no_grad():
        for _ in range(characters):
            probabilities = model(tokens[None, -context_length:])[0, -1].softmax(dim=0)
            tokens = torch.cat([tokens, probabilities.multinomial(1, generator=generator)])
    return decode(tokens[-characters:])


def describe(trained: Trained, text: str) -> str:
    """Return a text and its continuation."""
    return text + predict(trained, text)
