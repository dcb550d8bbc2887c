"""Task of a generative adversarial network: a generator and a discriminator with an optimizer each."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from pipeline.tasks import StepOutput, Task


class GAN(Task):
    """Generator and discriminator that train against each other, for batches of (noise, images).

    Goodfellow et al. 2014, "Generative Adversarial Networks", arXiv 1406.2661, with the loss of the generator that
    doesn't saturate. The model has the parts ``generator(noise) -> images`` and ``discriminator(images) -> logits``,
    one for each image; images have values from -1 to 1. `pipeline.data.with_noise` makes such batches. Yields losses
    of the optimizers ``discriminator`` and ``generator``. Metrics see the discriminator's logits of real and generated
    images, shape (2 * batch), and 1 or 0 for each.
    """

    _noise_shape: torch.Size | None = None

    def __init__(self, *, pictures: int = 64) -> None:
        """Set the number of images to generate for a picture after each evaluation."""
        self._pictures = pictures

    @override
    def __call__(self, model: nn.Module, batch: Any) -> Iterator[StepOutput]:
        """Yield the loss of the discriminator and, after its step, that of the generator."""
        noise, real = batch
        self._noise_shape = noise.shape[1:]
        parts: Any = model
        generated = parts.generator(noise)
        logits = torch.cat([parts.discriminator(real).flatten(), parts.discriminator(generated.detach()).flatten()])
        is_real = (torch.arange(len(logits), device=logits.device) < len(real)).to(logits.dtype)
        loss = functional.binary_cross_entropy_with_logits(logits, is_real)
        yield StepOutput(loss, logits, is_real.long(), optimizer="discriminator")
        fooled = parts.discriminator(generated).flatten()
        yield StepOutput(functional.softplus(-fooled).mean(), fooled, None, optimizer="generator")

    def pictures(self, model: nn.Module) -> dict[str, Tensor]:
        """Generate images of noise that is the same after each evaluation."""
        if self._noise_shape is None:  # no batch yet
            return {}
        weights = next(model.parameters())
        noise = torch.randn(self._pictures, *self._noise_shape)  # on the CPU: equal on any device
        parts: Any = model
        images: Tensor = parts.generator(noise.to(weights))
        return {"generated": (images + 1) / 2}
