"""Weights other than the initial ones, at which the outputs of samples differ.

At initialization, or where an output layer starts from zeros, all samples may have the same loss.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from pipeline.training.ranks.norms import local

_OF_VECTORS = 0.1
"""Standard deviation of the noise on biases, scales and single numbers."""


@contextmanager
@torch.no_grad()
def perturb(parameters: Sequence[nn.Parameter], *, model: nn.Module, scale: float) -> Iterator[None]:
    """Add noise to parameters inside the block, the same on all ranks.

    Matrices get noise of the size of a usual initialization, times ``scale``, so that outputs differ but stay finite.
    The rows of zeros of an embedding with a ``padding_idx`` stay: padding never gets a gradient.
    """
    embeddings = [one for one in model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)]
    padded = {id(one.weight) for one in embeddings if one.padding_idx is not None}
    chosen = [one for one in parameters if one.is_floating_point()]
    held = [local(one.detach()) for one in chosen]
    before = [one.to("cpu", copy=True) for one in held]  # the memory of a GPU is scarcer
    try:
        for number, (parameter, values) in enumerate(zip(chosen, held, strict=True)):
            # Of a sharded parameter each shard gets the same noise: replicas of a shard must stay equal.
            generator = torch.Generator(values.device).manual_seed(number)
            noise = torch.empty_like(values).normal_(generator=generator)
            fan_in = math.prod(parameter.shape[1:]) if parameter.ndim > 1 else 0
            if id(parameter) in padded:
                noise[(values == 0).all(-1)] = 0
            values.add_(noise, alpha=scale * (fan_in**-0.5 if fan_in else _OF_VECTORS))
        yield
    finally:
        for values, kept in zip(held, before, strict=True):
            values.copy_(kept)
