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


def main() -> None:
    """Print the answers of a run's model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("text", help="beginning of the text")
    parser.add_argument("--characters", type=int, default=200, help="length of the continuation; default: 200")
    parser.add_argument("--run", default="latest", help="part of a run's id, or its folder; default: the latest run")
    arguments = parser.parse_args()
    try:
        trained = Trained.load(arguments.run)
        continuation = predict(trained, arguments.text, characters=arguments.characters)
        print(f"answers of {trained.folder}:", file=sys.stderr)
        print(arguments.text + continuation)
    except (OSError, ValueError, PipelineError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
