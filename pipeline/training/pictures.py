"""Pictures that a task draws with the model after each evaluation, such as generated samples, as PNGs of the run."""

import logging
import math
import tempfile
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import torch
from torch import Tensor
from torch.nn.functional import pad

from pipeline.protocol.events import ArtifactSaved, Outbox, Warned
from pipeline.training.context import TrainContext
from pipeline.training.evaluation import evaluation_module, resulting_weights
from pipeline.training.randomness import generators_kept, mix, seed_all
from pipeline.wording import first_line

_LEAST_PIXELS = 48
"""Height of an image in a picture, at least; smaller ones are enlarged by a whole number."""
_log = logging.getLogger(__name__)


def log(context: TrainContext, outbox: Outbox, *, step: int) -> None:
    """Let the task draw with the resulting weights; rank 0 sends the pictures. Collective.

    All ranks draw, and draw the same random numbers, at every step. A task that fails to is warned of: no picture may
    cost the training.
    """
    if not hasattr(context.task, "pictures"):
        return
    with resulting_weights(context), torch.no_grad(), generators_kept(), context.autocast():
        module = evaluation_module(context).eval()
        seed_all(mix(context.experiment.seed, "pictures"), device=context.device)
        try:
            drawn = {name: _grid(images) for name, images in cast(Any, context.task).pictures(module).items()}
        except Exception as error:  # noqa: BLE001 - user code may raise anything
            _log.warning("the task could not draw", exc_info=error)
            drawn = {}
            message = f"the task's pictures could not be drawn: {first_line(error)}. Training is not affected."
            outbox.event(Warned(trial=context.trial.name, message=message, subject="pictures"))
        finally:
            context.wrapped.train()
    for name, grid in drawn.items() if context.rank.is_first else ():
        _send(grid, f"samples/{quote(name, safe='')}-{step:06d}.png", context=context, outbox=outbox)


def _grid(images: Tensor) -> Tensor:
    """Arrange images (images, channels, height, width) of values from 0 to 1 in a grid: bytes (height, width, 3).

    Raises:
        ValueError: they have another shape.
    """
    if images.ndim != 4 or images.shape[1] not in (1, 3) or not len(images):
        raise ValueError(f"images have the shape {tuple(images.shape)}, not (images, 1 or 3 channels, height, width)")
    factor = max(1, -(-_LEAST_PIXELS // images.shape[2]))
    pixels = (images.detach().float().cpu().clamp(0, 1) * 255).round().byte().expand(-1, 3, -1, -1)
    enlarged = pixels.repeat_interleave(factor, 2).repeat_interleave(factor, 3)
    columns = math.ceil(math.sqrt(len(images)))
    rows = -(-len(images) // columns)
    framed = pad(enlarged, (1, 1, 1, 1), value=255)
    filled = pad(framed, (0, 0, 0, 0, 0, 0, 0, rows * columns - len(images)), value=255)
    _, channels, height, width = filled.shape
    cells = filled.view(rows, columns, channels, height, width).permute(0, 3, 1, 4, 2)
    return cells.reshape(rows * height, columns * width, channels)


def _send(grid: Tensor, place: str, *, context: TrainContext, outbox: Outbox) -> None:
    from matplotlib.image import imsave  # takes half a second, needed for pictures only

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "picture.png"
        imsave(path, grid.numpy())
        outbox.file(path, place)
    outbox.event(ArtifactSaved(trial=context.trial.name, path=place))
