"""The model: a vision transformer (Dosovitskiy et al. 2020, arXiv 2010.11929).

Replace it with your own: any class or function that returns an `nn.Module` can be used as `model:` in
`experiments/*.yaml`, with its keyword arguments.

Layers are normalized by sample, so the model trains the same on one worker and on many.
"""

import torch
from torch import Tensor, nn


class ViT(nn.Module):
    """Patches of an image as the tokens of a transformer encoder, whose mean is classified.

    Args:
        num_classes: number of logits.
        in_channels: channels of the images.
        image_size: height and width of the images.
        patch_size: height and width of a patch, a divisor of `image_size`.
        width: features of a token, a multiple of `heads`.
        depth: transformer blocks.
        heads: attention heads.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        in_channels: int,
        image_size: int,
        patch_size: int = 4,
        width: int = 64,
        depth: int = 3,
        heads: int = 4,
    ) -> None:
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"patches of {patch_size} don't fill an image of {image_size}; use a divisor of it")
        self.patches = nn.Conv2d(in_channels, width, patch_size, stride=patch_size)
        self.position = nn.Parameter(0.02 * torch.randn((image_size // patch_size) ** 2, width))
        self.blocks = nn.Sequential(*(_Block(width, heads=heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, in_channels, image_size, image_size) to logits (batch, num_classes)."""
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.position
        logits: Tensor = self.classifier(self.norm(self.blocks(tokens)).mean(dim=1))
        return logits


class _Block(nn.Module):
    """Attention, then a perceptron, each normalized before and added to what it read."""

    def __init__(self, width: int, *, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.project(self._attention(self.query_key_value(self.norm1(x))))
        out: Tensor = x + self.perceptron(x)
        return out

    def _attention(self, query_key_value: Tensor) -> Tensor:
        batch, time, _ = query_key_value.shape
        heads = query_key_value.view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        return nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
