"""Built-in packages: the kinds of classes, the functions and the arguments that an experiment file may use of them.

Whole packages can't be allowed: their utilities write files, unpickle them and download code.
"""

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.config import keys
from pipeline.errors import Problem

_KINDS = frozenset(
    {
        "torch.nn.modules.module.Module",
        "torch.optim.optimizer.Optimizer",
        "torch.optim.lr_scheduler.LRScheduler",
        "torch.utils.data.dataset.Dataset",
        "torch.utils.data.sampler.Sampler",
        "torchmetrics.metric.Metric",
        "transformers.configuration_utils.PreTrainedConfig",
        "transformers.configuration_utils.PretrainedConfig",  # until transformers 4
        "pipeline.tasks.protocols.Task",
    }
)
"""Base classes. They are compared by name, so that none has to be imported."""
_TRANSFORMS = "torchvision.transforms."
"""Package whose classes are all allowed: the older transforms have no common base class."""
_EXCLUDED = (
    "torch.utils.data.datapipes.",  # write files, and unpickle what they read
    "torchmetrics.multimodal.clip_score.",  # sets trust_remote_code for some names of models
    "torchmetrics.multimodal.clip_iqa.",
    "torchmetrics.text.bert.",  # load any model by its name, and ask on the terminal whether to run its code
    "torchmetrics.text.infolm.",
    "torchvision.datasets.lsun.",  # unpickles a cache file
)
"""Modules with classes of these kinds that are not allowed."""
_FUNCTIONS = frozenset(
    {
        "pipeline.data.Splits",
        "pipeline.data.arrays",
        "pipeline.data.characters",
        "pipeline.data.digits",
        "pipeline.data.example_sentences",
        "pipeline.data.padding.padded",
        "pipeline.data.tabular",
        "pipeline.data.texts",
        "pipeline.data.tokens",
        "pipeline.models.pretrained",
        "pipeline.models.resnet18",
        "pipeline.models.resnet50",
        "pipeline.tasks.lightning.configured_optimizer",
        "pipeline.tasks.lightning.configured_scheduler",
        "timm.models.create_model",
        "torch.nn.utils.parametrizations.orthogonal",
        "torch.nn.utils.parametrizations.spectral_norm",
        "torch.nn.utils.parametrizations.weight_norm",
        "torch.nn.utils.spectral_norm",
        "torch.nn.utils.weight_norm",
        "torch.optim.swa_utils.get_ema_avg_fn",
        "torch.optim.swa_utils.get_ema_multi_avg_fn",
        "torch.utils.data.default_collate",
        "torch.utils.data.random_split",
        "torchvision.models.get_model",
    }
)
"""Allowed functions, besides the builders of models that torchvision and timm register."""
_BUILDERS = {
    "torchvision.models": ("list_models", "get_model_builder"),
    "timm.models": ("list_models", "model_entrypoint"),
}
"""Functions that list the registered models of a package, and that return the builder of one."""
_FORBIDDEN = frozenset(
    {
        "allow_all_kernels",
        "allow_pickle",
        "auto_map",
        "checkpoint_path",
        "feature_extractor_weights_path",
        "loader",
        "pickle_module",
        "pretrained_cfg",  # may name a file, which timm unpickles
        "pretrained_cfg_overlay",
        "runtime_env",
        "trust_remote_code",
        "weights_only",
    }
)
"""Arguments that name code, pickles or remote code, at any depth."""
_WITH_CLASSES = ("torch.nn", "torchmetrics", "torchvision.transforms")
"""Packages with functions in "functional", and classes that call them."""
_ATTENTION = re.compile(r"[\w|]*")  # org/name is code on the hub
_MODEL = re.compile(r"((hf[-_]hub|timm):)?[^:$]*")  # local-dir:folder is a pickle
_LIMITED = {
    "_attn_implementation": _ATTENTION,
    "_attn_implementation_internal": _ATTENTION,
    "attn_implementation": _ATTENTION,
    "architecture": _MODEL,
    "backbone": _MODEL,
    "model_name": _MODEL,
}
"""Arguments that name code only if their text doesn't match."""


def rejection_reason(found: object) -> str:
    """Return why an experiment file can't name a class or function of a built-in package; empty if it can."""
    home = f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', '')}"
    if home.startswith(_EXCLUDED):
        return "can load and run code"
    if _is_listed(found):
        return ""
    if inspect.isclass(found):
        bases = {f"{base.__module__}.{base.__qualname__}" for base in found.__mro__}
        is_kind = not bases.isdisjoint(_KINDS) or home.startswith(_TRANSFORMS)
        return "" if is_kind else "is not a model, loss, optimizer, scheduler, dataset, sampler, transform or metric"
    return "" if _is_builder(found, home) else "is not on the list of allowed functions"


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


def find_rejected_arguments(
    arguments: Mapping[str, Any] | Sequence[Any], *, key: str, limit: re.Pattern[str] | None = None
) -> Iterator[Problem]:
    """Find arguments that name code, outside of nested components.

    Args:
        arguments: arguments of a class or function of a built-in package, or a value among them.
        key: its key.
        limit: pattern of the texts in it.
    """
    items = arguments.items() if isinstance(arguments, Mapping) else enumerate(arguments)
    for name, value in items:
        inner = keys.child(key, name)
        pattern = _LIMITED.get(str(name), limit)
        if name in _FORBIDDEN or (isinstance(value, str) and pattern and not pattern.fullmatch(value)):
            given = f" {value}" if isinstance(value, str | bool) else ""
            yield Problem(inner, f"{name}{given} can make a library run code. Remove it.")
        elif isinstance(value, list | tuple) or (isinstance(value, Mapping) and "_target_" not in value):
            yield from find_rejected_arguments(value, key=inner, limit=pattern)


def _is_listed(found: object) -> bool:
    """Return True if this is one of the listed functions, which are defined in submodules of the packages named."""
    name = getattr(found, "__name__", "")
    packages = (listed.rpartition(".")[0] for listed in _FUNCTIONS if listed.endswith(f".{name}"))
    return any(getattr(sys.modules.get(package), name, None) is found for package in packages)


def _is_builder(found: object, home: str) -> bool:
    """Return True if torchvision or timm registered this function as the builder of a model."""
    for package, (names, builder) in _BUILDERS.items():
        if home.startswith(f"{package}."):
            models = sys.modules[package]
            return any(getattr(models, builder)(name) is found for name in getattr(models, names)())
    return False
