"""A text, a recurrent model and tasks with a state for tests, named by ``_target_: toy_sequences.NAME``."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from pipeline.tasks import RecurrentLanguageModel, StepOutput, gathered

TOKENS, WINDOW = 7, 3


def text(chunks: int = 26, validation: int = 11) -> tuple[TensorDataset, TensorDataset | None]:
    """Chunks of a text in its order: each token follows from the four before it, or is drawn."""
    return _chunks(chunks, seed=0), _chunks(validation, seed=1) if validation else None


def _chunks(count: int, *, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(TOKENS, (4,), generator=generator).tolist()
    while len(tokens) <= count * WINDOW:
        drawn = int(torch.randint(3, (), generator=generator))
        tokens.append((sum(tokens[-4:]) + drawn) % TOKENS)
    row = torch.tensor(tokens[: count * WINDOW + 1])
    return TensorDataset(row[:-1].view(-1, WINDOW), row[1:].view(-1, WINDOW))


class Net(nn.Module):
    """A recurrent model of two kinds of layers, whose state is a dictionary."""

    def __init__(self, width: int = 5, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        self.lower = nn.LSTM(width, width, num_layers=2, batch_first=True, dropout=dropout)
        self.upper = nn.GRU(width, width, batch_first=True)
        self.output = nn.Linear(width, TOKENS)

    def forward(self, tokens: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        before = state or {"lower": None, "upper": [None]}
        hidden, lower = self.lower(self.embedding(tokens), before["lower"])
        hidden, upper = self.upper(hidden, before["upper"][0])
        return self.output(hidden), {"lower": lower, "upper": [upper]}


class BatchFirst:
    """A task whose state has its rows first, as an exponential average of the tokens."""

    batch_dim = 0

    def __call__(self, model: nn.Module, batch: Any, state: Any = None) -> StepOutput:
        tokens, targets = batch
        state = torch.zeros(len(tokens), 4, dtype=torch.float64) if state is None else state
        outputs = []
        for token in tokens.T:
            state = 0.9 * state + nn.functional.one_hot(token % 4, 4)
            outputs.append(model(state))
        logits = torch.stack(outputs, 1)
        return StepOutput(cross_entropy(logits.flatten(0, 1), targets.flatten()), logits, targets, state=state)


class Returns(RecurrentLanguageModel):
    """Returns another state than it should."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __call__(self, model: nn.Module, batch: Any, state: Any = None) -> StepOutput:
        output = super().__call__(model, batch, state)
        wrong = {"nothing": None, "numbers": (output.loss, 3), "one row": torch.zeros(2, 1), "scalar": output.loss}
        return output._replace(state=wrong[self._what])


class Undeclared:
    """Returns a state, but has no batch_dim."""

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        return RecurrentLanguageModel()(model, batch)


class Gathering(RecurrentLanguageModel):
    """Compares all rows of a global batch."""

    def __call__(self, model: nn.Module, batch: Any, state: Any = None) -> StepOutput:
        output = super().__call__(model, batch, state)
        return output._replace(loss=output.loss + gathered(batch[0]).double().mean())


class Infinite(RecurrentLanguageModel):
    """Task whose loss and state are no numbers in one step."""

    def __init__(self, at: int) -> None:
        self._left = at

    def __call__(self, model: nn.Module, batch: Any, state: Any = None) -> StepOutput:
        output = super().__call__(model, batch, state)
        self._left -= model.training
        if self._left or not model.training:
            return output
        return output._replace(loss=output.loss * torch.nan, state={"lower": [torch.full((2, 4, 5), torch.nan)]})
