"""Batches of token sequences of different lengths, padded by a tokenizer: a ``loader.collate``."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pipeline.config.extras import needs
from pipeline.errors import ExperimentError

IGNORED = -100
"""Label of padding, which losses ignore."""
Batch = dict[str, Tensor]


@needs("transformers")
def padded(
    tokenizer: str, *, labels: str = "labels", pad_token: str | None = None, multiple_of: int | None = None
) -> Callable[[Sequence[Mapping[str, Any]]], Batch]:
    """Return a collate_fn that pads mappings such as {input_ids, attention_mask, labels}.

    Args:
        tokenizer: folder of a transformers tokenizer, or its name on the Hugging Face hub.
        labels: key of the labels. Sequences of labels are padded with -100, on the tokenizer's padding side.
        pad_token: token to pad with, for tokenizers without a padding token.
        multiple_of: round lengths up to a multiple of this number, which is faster on tensor cores.

    Raises:
        ExperimentError: the tokenizer can't be loaded, or has no padding token.
    """
    loaded = load_tokenizer(tokenizer, key="loader.collate.tokenizer")
    if pad_token is not None:
        loaded.pad_token = pad_token
    if loaded.pad_token is None:
        message = f"{tokenizer} has no padding token; set one, e.g. {loaded.eos_token}"
        raise ExperimentError.of("loader.collate.pad_token", message)
    return _Padding(loaded, labels=labels, multiple_of=multiple_of)


def load_tokenizer(path: str, *, key: str) -> Any:
    """Load a tokenizer of transformers, which runs no code.

    Raises:
        ExperimentError: it can't be loaded.
    """
    from transformers import AutoTokenizer  # takes seconds, and is an extra

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        said = " ".join(str(error).split())[:300]
        raise ExperimentError.of(key, f"can't load a tokenizer from {path}: {said}") from error


class _Padding:
    def __init__(self, tokenizer: Any, *, labels: str, multiple_of: int | None) -> None:
        self._tokenizer, self._labels, self._multiple_of = tokenizer, labels, multiple_of
        tokenizer.deprecation_warnings["Asking-to-pad-a-fast-tokenizer"] = True  # texts are tokens already

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        names = [name for name in samples[0] if name != self._labels]
        inputs = {name: [sample[name] for sample in samples] for name in names}
        batch = dict(
            self._tokenizer.pad(inputs, padding=True, pad_to_multiple_of=self._multiple_of, return_tensors="pt")
        )
        if self._labels in samples[0]:
            given = [torch.as_tensor(sample[self._labels]) for sample in samples]
            batch[self._labels] = self._padded(given, length=batch["input_ids"].shape[1])
        return batch

    def _padded(self, labels: Sequence[Tensor], *, length: int) -> Tensor:
        if not labels[0].ndim:
            return torch.stack(list(labels))
        whole = pad_sequence(
            [*labels, torch.empty(length, dtype=labels[0].dtype)],  # as long as the inputs
            batch_first=True,
            padding_value=IGNORED,
            padding_side=self._tokenizer.padding_side,
        )
        return whole[:-1]
