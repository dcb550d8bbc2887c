"""Scaling efficiencies that others published, and what the model says to them.

Horovod's benchmark page (github.com/horovod/horovod, docs/benchmarks.rst): 128 servers with 4 Pascal GPUs each, RoCE
at 25 Gbit/s, tf_cnn_benchmarks with 64 images for each GPU, weak scaling; its README had VGG-16 at 128 GPUs. The ring
passes each server's card once, so each worker's bandwidth is that of the card.

Not in those sources, and so assumed: the throughput of one GPU is that of a P100 in TensorFlow's performance guide
(tensorflow.org/performance/benchmarks, DGX-1, synthetic data, batch 64), for ResNet-101, which is not in it, between
those of ResNet-50 and ResNet-152 by their floating-point operations; backward takes twice as long as forward; 10 us
from one GPU to the next; Horovod's fusion buffer of 64 MiB acts like a bucket; gradients become ready evenly, except
that VGG-16's fully connected layers, 90 % of its parameters, are there after a tenth of backward.
"""

from typing import NamedTuple

from pydantic import BaseModel

from pipeline.protocol.trial_result import BatchCost, Costs, Gradient, Link
from pipeline.results.prediction import Workload, predict

LINK = Link(latency_us=10, bandwidth_gbit=25)
BATCH, BUCKET_BYTES, LAYERS = 64, 64 * 2**20, 100


class Model(NamedTuple):
    """A network: parameters in millions, those that come first in backward among them, images/s on one GPU."""

    parameters: float
    early: float
    images_per_second: float


INCEPTION_V3 = Model(23.8, 0.0, 142)
RESNET_101 = Model(44.5, 0.0, 132)
VGG_16 = Model(138.4, 123.6, 154)
FIGURES = (
    ("Inception V3", INCEPTION_V3, 512, 0.90),
    ("ResNet-101", RESNET_101, 512, 0.90),
    ("VGG-16", VGG_16, 128, 0.79),
    ("VGG-16", VGG_16, 512, 0.68),
)


class Point(BaseModel):
    """One published scaling efficiency and the predicted one."""

    model: str
    gpus: int
    published: float
    predicted: float


def points() -> list[Point]:
    """What the model says to all of them."""
    return [
        Point(
            model=name,
            gpus=gpus,
            published=efficiency,
            predicted=predict(_workload(model, gpus=gpus), LINK, workers=gpus).speedup / gpus,
        )
        for name, model, gpus, efficiency in FIGURES
    ]


def table(found: list[Point]) -> list[str]:
    """Lines of Markdown."""
    return [
        "## Published figures",
        "",
        "Horovod's 512-GPU benchmark: Pascal GPUs, 4 to a server, RoCE at 25 Gbit/s, weak scaling with 64 images for",
        "each GPU. What had to be assumed stands in `benchmarks/published.py`.",
        "",
        "| model | GPUs | efficiency published | predicted | error |",
        "|---|---|---|---|---|",
        *(
            f"| {p.model} | {p.gpus} | {p.published:.0%} | {p.predicted:.0%} | {p.predicted / p.published - 1:+.0%} |"
            for p in found
        ),
    ]


def _workload(model: Model, *, gpus: int) -> Workload:
    step_ms = 1e3 * BATCH / model.images_per_second
    late = (model.parameters - model.early) / LAYERS
    gradients = [Gradient(bytes=round(4e6 * late), ready=(i + 1) / LAYERS) for i in range(LAYERS)]
    if model.early:
        gradients.append(Gradient(bytes=round(4e6 * model.early), ready=0.1))
    cost = BatchCost(samples=BATCH, forward_ms=step_ms / 3, backward_ms=step_ms * 2 / 3, data_ms=0.0)
    return Workload(
        costs=Costs(curve=(cost,), gradients=tuple(gradients), world_size=1),
        optimizer_ms=0.0,
        global_batch_size=BATCH * gpus,
        bucket_bytes=BUCKET_BYTES,
        backend="nccl",
    )
