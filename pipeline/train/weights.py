"""Initial weights of ``train.start_from``: read by rank 0, compared with the model, sent to all ranks.

They are loaded before a strategy wraps or shards the model, so each rank begins with the same ones.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from pipeline.errors import ExperimentError, PipelineError, Problem
from pipeline.experiment.train import StartFrom
from pipeline.protocol.events import Loaded
from pipeline.protocol.trial import Evaluation, Rank, Training, Trial, Weights
from pipeline.train.names import TASK, shown
from pipeline.train.ranks import broadcast_from_first, copy_from_first
from pipeline.train.storage import Storage
from pipeline.wording import listed

_KEY = "train.start_from"


class Fit(NamedTuple):
    """Names of saved tensors beside those of a model."""

    taken: Mapping[str, str]  # Saved name of each tensor of the model that is loaded
    missing: tuple[str, ...]  # Names of the model without a saved tensor
    unused: tuple[str, ...]  # Saved names, renamed, that the model lacks
    misshapen: Mapping[str, str]  # Names with shapes that differ, and both shapes in words


def load(model: nn.Module, trial: Trial, *, rank: Rank, device: torch.device) -> Loaded | None:
    """Load the weights that a trial starts from into its model, on all ranks. Collective.

    Returns None if the experiment names none, or a checkpoint has the weights: of a resumed training, of an evaluation.
    """
    start = trial.experiment.train.start_from
    if start is None or isinstance(trial, Evaluation):
        return None
    own = model.state_dict()

    @torch.no_grad()
    def fill() -> tuple[Loaded, list[str]] | None:
        if (initial := trial.initial) is None:
            if isinstance(trial, Training) and trial.resume:
                return None
            message = "its weights were not loaded by the driver; start training with pipeline run"
            raise ExperimentError.of(_KEY, message)
        found, saved = fit(model, start, initial), _read(initial)
        for name, source in found.taken.items():
            own[name].copy_(saved[source])
        left = *found.missing, *found.misshapen
        loaded = Loaded(source=initial.source, tensors=len(found.taken), left=left, unused=found.unused)
        return loaded, list(found.taken)

    filled = broadcast_from_first(fill, rank=rank)
    if filled is None:
        return None
    copy_from_first([own[name] for name in filled[1]], rank=rank, device=device)
    return filled[0]


def fit(model: nn.Module, start: StartFrom, initial: Weights) -> Fit:
    """Compare the names and shapes of a file with those of a model, which may be on the meta device."""
    saved = _read(initial)
    names = renamed(list(saved), start.rename)
    there = {new: (old, tuple(saved[old].shape)) for old, new in names.items()}
    own = {name: one for name, one in model.state_dict(keep_vars=True).items() if isinstance(one, Tensor)}
    shapes = {name: tuple(one.shape) for name, one in own.items()}
    taken = {name: there[name][0] for name, shape in shapes.items() if name in there and there[name][1] == shape}
    tied = {id(own[name]) for name in taken}  # such as an output that shares the embedding's weight
    found = Fit(
        taken=taken,
        missing=tuple(name for name in own if name not in there and id(own[name]) not in tied),
        unused=tuple(name for name in there if name not in own),
        misshapen={
            name: f"{there[name][1]} in the file, {shape} in the model"
            for name, shape in shapes.items()
            if name in there and name not in taken
        },
    )
    if not taken:
        has = f"The file has {listed(list(names.values()))}. The model has {listed(list(own))}"
        raise ExperimentError.of(_KEY, f"no tensor in {initial.source} matches the model. {has}; set rename")
    if start.strict and (problems := list(_differences(found, initial))):
        raise ExperimentError(problems)
    return found


def renamed(names: Sequence[str], rename: Mapping[str, str]) -> dict[str, str]:
    """Return the new name of each saved name; the longest beginning counts."""
    used: set[str] = set()
    found: dict[str, str] = {}
    for name in names:
        old = max((one for one in rename if _begins(name, one)), key=len, default=None)
        found[name] = name
        if old is not None:
            used.add(old)
            parts = rename[old].strip("."), name[len(old.rstrip(".")) :].strip(".")
            found[name] = ".".join(part for part in parts if part)
    problems = []
    for old in rename:
        if old not in used:
            message = f"{old} matches no saved name, or a longer key matches it; there are {listed(names)}"
            problems.append(Problem(f"{_KEY}.rename", message))
    for new, count in Counter(found.values()).items():
        if count > 1:
            problems.append(Problem(f"{_KEY}.rename", f"gives several tensors the name {new}; rename one of them"))
    if problems:
        raise ExperimentError(problems)
    return found


def _begins(name: str, old: str) -> bool:
    beginning = old.rstrip(".")
    return not beginning or name == beginning or name.startswith(f"{beginning}.")


def _differences(found: Fit, initial: Weights) -> Iterator[Problem]:
    """Yield one problem for each kind of difference."""
    if found.missing:
        remedy = "; name its prefix in rename, or set strict: false to initialize them"
        yield Problem(_KEY, f"{initial.source} lacks {listed(found.missing)}, which the model has{remedy}")
    if found.unused:
        remedy = "; set strict: false to ignore them"
        yield Problem(_KEY, f"{initial.source} has {listed(found.unused)}, which the model lacks{remedy}")
    if found.misshapen:
        shapes = listed([f"{name}: {shape}" for name, shape in found.misshapen.items()])
        remedy = "; set strict: false to initialize them"
        yield Problem(_KEY, f"{initial.source} has other shapes than the model: {shapes}{remedy}")


def _read(initial: Weights) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file, of a run's weights without those of its task, or of a checkpoint."""
    try:
        if initial.checkpoint:
            from pipeline.train import saved_state  # imports all of the training, which the driver needs for this only

            with Storage(initial.path).fetched(initial.checkpoint) as folder:
                saved = {shown(name): one for name, one in saved_state.read(folder, fills=True)["model"].items()}
        elif initial.path.endswith(".safetensors"):
            return load_file(initial.path)
        else:
            saved = torch.load(initial.path, map_location="cpu", mmap=True, weights_only=True)
    except PipelineError:
        raise  # already has a message for the user
    except Exception as error:  # a storage may raise anything
        said = " ".join(str(error).split())[:200]
        message = f"{initial.path} can't be read on the node of rank 0: {said}; name another file"
        raise ExperimentError.of(_KEY, message) from error
    # Others are extra state.
    return {name: one for name, one in saved.items() if isinstance(one, Tensor) and not name.startswith(TASK)}
