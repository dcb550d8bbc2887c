"""Files of an evaluation for the run's folder: curves and large results of metrics, and images that a task draws."""

import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from torch import Tensor
from torch.nn.functional import pad

from pipeline.protocol.events import ArtifactSaved
from pipeline.train.metrics import Drawable

if TYPE_CHECKING:
    from pipeline.train.state import State

_LEAST_PIXELS = 48
"""Height of an image in a picture, at least; smaller ones are enlarged by a whole number."""


def curve(s: "State", name: str, drawn: Drawable) -> None:
    """Send a curve or a large result of the last evaluation from rank 0 as metrics/NAME.csv and .png."""
    if not s.rank.is_first:
        return
    with tempfile.TemporaryDirectory() as folder:
        table, picture = Path(folder) / "curve.csv", Path(folder) / "curve.png"
        drawn.write(table)
        drawn.draw(picture, title=name)
        for path in (table, picture):
            _send(s, path, f"metrics/{quote(name, safe='')}{path.suffix}")


def images(s: "State", name: str, grid: Tensor) -> None:
    """Send images, as `arrange` returns them, from rank 0 as samples/NAME-STEP.png."""
    if not s.rank.is_first:
        return
    from matplotlib.image import imsave  # takes half a second, needed for pictures only

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "picture.png"
        imsave(path, grid.numpy())
        _send(s, path, f"samples/{quote(name, safe='')}-{s.step:06d}.png")


def _send(s: "State", path: Path, place: str) -> None:
    if s.outbox is not None:
        s.outbox.file(path, place)
        s.send(ArtifactSaved(trial=s.trial.name, path=place))


def arrange(images: Tensor) -> Tensor:
    """Arrange images (images, channels, height, width) of values from 0 to 1 in a grid: bytes (height, width, 3)."""
    if images.ndim != 4 or images.shape[1] not in (1, 3) or not len(images):
        raise ValueError(f"images have the shape {tuple(images.shape)}, not (images, 1 or 3 channels, height, width)")
    factor = max(1, -(-_LEAST_PIXELS // images.shape[2]))
    pixels = (images.detach().float().cpu().clamp(0, 1) * 255).round().byte().expand(-1, 3, -1, -1)
    framed = pad(pixels.repeat_interleave(factor, 2).repeat_interleave(factor, 3), (1, 1, 1, 1), value=255)
    columns = math.ceil(math.sqrt(len(images)))
    rows = -(-len(images) // columns)
    filled = pad(framed, (0, 0, 0, 0, 0, 0, 0, rows * columns - len(images)), value=255)
    _, channels, height, width = filled.shape
    cells = filled.view(rows, columns, channels, height, width).permute(0, 3, 1, 4, 2)
    return cells.reshape(rows * height, columns * width, channels)
