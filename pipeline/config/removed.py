"""What an experiment file could name in earlier versions and can't any more, with what to use instead."""

from collections.abc import Mapping

KEYS: Mapping[str, str] = {
    "order.contiguous": (
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
    "pipeline.tasks.loss_terms.LossTerms": f"{_OWN} The page on detection in the docs has an example.",
}
"""Remedy by dotted name of a component."""
