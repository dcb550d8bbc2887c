"""Built-in packages: names that run or fetch code, which an experiment file can't use, and classes for functions."""

import sys

_RUN_CODE = (
    "timm.models._helpers",  # unpickle checkpoints
    "timm.models._hub",
    "torch.utils.data.datapipes",  # write files, and unpickle what they read
    "torchmetrics.functional.multimodal.clip_iqa",  # set trust_remote_code for some names of models
    "torchmetrics.functional.multimodal.clip_score",
    "torchmetrics.functional.text.bert",  # load any model by its name, and ask on the terminal whether to run its code
    "torchmetrics.functional.text.infolm",
    "torchmetrics.multimodal.clip_iqa",
    "torchmetrics.multimodal.clip_score",
    "torchmetrics.text.bert",
    "torchmetrics.text.infolm",
    "torchvision.datasets.lsun",  # unpickles a cache file
    "torchvision.datasets.utils",  # download and unpack files
)
"""Modules of built-in packages that can't be used: at most 20."""
_WITH_CLASSES = ("torch.nn", "torchmetrics", "torchvision.transforms")
"""Packages with functions in "functional", and classes that call them."""


def can_run_code(found: object) -> bool:
    """Return True for a class or function of a built-in package that can run or fetch code."""
    home = f"{getattr(found, '__module__', '')}."
    return any(home.startswith(f"{module}.") for module in _RUN_CODE)


def class_of_function(target: str) -> str:
    """Return the class that does what a function does, e.g. torch.nn.MSELoss for torch.nn.functional.mse_loss.

    Empty for functions without such a class.
    """
    package, _, name = target.rpartition(".")
    owner = ".".join(part for part in package.split(".") if part != "functional")
    module = sys.modules.get(owner) if owner != package and owner.startswith(_WITH_CLASSES) else None
    wanted = _letters(name.replace("binary_cross_entropy", "bce"))
    names = vars(module) if module is not None else ()
    return next((f"{owner}.{one}" for one in names if one[:1].isupper() and _letters(one) == wanted), "")


def _letters(name: str) -> str:
    return name.lower().replace("_", "").removesuffix("loss")
