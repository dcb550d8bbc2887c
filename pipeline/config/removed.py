"""Keys, components and values of earlier versions that were removed, with what to use instead."""

from collections.abc import Mapping
from typing import Any

KEYS: Mapping[str, str] = {
    "sampler.contiguous": (
        "Remove it. A state is no longer carried from batch to batch, so each sample starts without one. Longer "
        "samples give a recurrent model more to remember."
    ),
}
"""Remedy by dotted key."""
_OWN = "Write it in a package of your project, and name it here."
_IN_PROJECT = "A project of your own has it after: pipeline new ddp-project NAME --set"
_CIFAR10 = f"{_IN_PROJECT} data=cifar10"
_CONTRASTIVE = f"{_IN_PROJECT} task=contrastive"
_GAN = f"{_IN_PROJECT} task=gan"
TARGETS: Mapping[str, str] = {
    "pipeline.data.shards": "Read the tar files with webdataset in an iterable dataset of your package (docs/data.md).",
    "pipeline.data.cifar10": _CIFAR10,
    "pipeline.data.two_views": _CONTRASTIVE,
    "pipeline.data.with_noise": _GAN,
    "pipeline.data.words": _OWN,
    "pipeline.models.DCGAN": _GAN,
    "pipeline.models.LSTM": _OWN,
    "pipeline.models.SimCLR": _CONTRASTIVE,
    "pipeline.models.resnet34": "Use torchvision.models.resnet34.",
    "pipeline.tasks.RecurrentLanguageModel": _OWN,
    "pipeline.tasks.contrastive.Contrastive": _CONTRASTIVE,
    "pipeline.tasks.gan.GAN": _GAN,
    "pipeline.tasks.linear_probe.LinearProbe": _CONTRASTIVE,
    "pipeline.tasks.loss_terms.LossTerms": f"{_OWN} examples/detection has an example.",
}
"""Remedy by dotted name of a component."""
VALUES: Mapping[tuple[str, str], str] = {
    ("tracking.loggers", "csv"): (
        "Remove it. To write a CSV table, copy the tracker of docs/extend.md into your package, and name that "
        "component."
    ),
}
"""Remedy by dotted key, without indices, and value."""


def drop_without_effect(tree: dict[str, Any]) -> None:
    """Drop what no longer exists and had no effect on the training from the experiment of a recorded run."""
    tracking = tree.get("tracking")
    if isinstance(tracking, dict) and isinstance(tracking.get("also"), list):
        tracking["also"] = [name for name in tracking["also"] if ("tracking.loggers", name) not in VALUES]
