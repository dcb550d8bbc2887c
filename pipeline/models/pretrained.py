"""Pretrained transformers models from a folder or the Hugging Face hub: safetensors only, no remote code."""

from typing import Any

import torch
from torch import nn

from pipeline.errors import ExperimentError
from pipeline.experiment.targets import needs
from pipeline.protocol.progress import note
from pipeline.system import quiet_transformers
from pipeline.wording import did_you_mean

_CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "features": "AutoModel",
    "image-classification": "AutoModelForImageClassification",
    "masked-lm": "AutoModelForMaskedLM",
    "multiple-choice": "AutoModelForMultipleChoice",
    "question-answering": "AutoModelForQuestionAnswering",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
}


@needs("transformers")
def pretrained(path: str, *, task: str, weights: bool = True, revision: str | None = None, **config: Any) -> nn.Module:
    """Return a transformers model with pretrained weights, in fp32.

    Args:
        path: folder with config.json and safetensors, as ``save_pretrained`` writes it, or a name on the Hugging Face
            hub, which is downloaded unless it is in the hub's cache. Other formats and remote code are never loaded.
        task: head of the model: causal-lm, features (none), image-classification, masked-lm, multiple-choice,
            question-answering, seq2seq-lm, sequence-classification or token-classification. A head without pretrained
            weights is initialized.
        weights: False builds the model from its configuration without weights, e.g. for ``train.start_from``.
        revision: branch, tag or commit on the hub.
        config: settings that replace values of the model's configuration, e.g. num_labels.

    Raises:
        ExperimentError: the folder or the name doesn't exist, or has no safetensors of this model.
    """
    if task not in _CLASSES:
        meant = did_you_mean(task, _CLASSES) or f"; write one of {', '.join(_CLASSES)}"
        raise ExperimentError.of("model.task", f"is {task!r}{meant}")
    import transformers  # takes seconds, and is an extra

    is_outline = torch.get_default_device().type == "meta"
    settings = _configuration(path, revision, config, downloads=not is_outline)
    kind = getattr(transformers, _CLASSES[task])
    missing: list[str] = []
    try:
        if not weights or is_outline:
            model = kind.from_config(settings, trust_remote_code=False)
        else:
            safe = {"use_safetensors": True, "trust_remote_code": False, "output_loading_info": True}
            with quiet_transformers():
                model, info = kind.from_pretrained(
                    path, config=settings, revision=revision, dtype=torch.float32, **safe
                )
            missing = sorted(info["missing_keys"])
    except (OSError, ValueError, RuntimeError) as error:
        raise _make_error(path, error) from error
    if missing and len(missing) >= len(model.state_dict()):
        raise ExperimentError.of("model.path", f"{path} has no weights for {type(model).__name__}; name another model")
    if missing:
        note(f"{path} has no weights for {', '.join(missing)}: initialized with random numbers", subject=path)
    built: nn.Module = model.float().train()
    return built


def _configuration(path: str, revision: str | None, config: dict[str, Any], *, downloads: bool) -> Any:
    """Read the configuration of a model and change it; without ``downloads`` from this machine only."""
    from transformers import AutoConfig

    try:
        settings = AutoConfig.from_pretrained(
            path, revision=revision, trust_remote_code=False, local_files_only=not downloads
        )
    except (OSError, ValueError) as error:
        raise _make_error(path, error) from error
    for name, value in config.items():
        if not hasattr(settings, name):
            meant = did_you_mean(name, [*settings.to_dict(), "num_labels"]) or "; see its config.json"
            raise ExperimentError.of(f"model.{name}", f"the configuration of {path} has no key {name}{meant}")
        setattr(settings, name, value)
    return settings


def _make_error(path: str, error: Exception) -> ExperimentError:
    said = " ".join(str(error).split())[:300]
    return ExperimentError.of("model.path", f"{path} can't be loaded: {said}")
