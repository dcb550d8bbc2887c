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
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Evaluation, Training, Trial, Weights
from pipeline.train.names import TASK, listed, shown
from pipeline.train.ranks import broadcast_from_first, copy_from_first
from pipeline.train.storage import Storage
from pipeline.wording import did_you_mean

_KEY = "train.start_from"
_COMPARED = 200
"""Names of each side that a renaming is looked for among."""


class Fit(NamedTuple):
    """Names of saved tensors beside those of a model."""

    taken: Mapping[str, str]
    """Saved name of each tensor of the model that is loaded."""
    missing: tuple[str, ...]
    """Names of the model without a saved tensor."""
    unused: tuple[str, ...]
    """Saved names, renamed, that the model lacks."""
    misshapen: Mapping[str, str]
    """Names with shapes that differ, and both shapes in words."""


def load(model: nn.Module, trial: Trial, *, rank: Rank, device: torch.device) -> Loaded | None:
    """Load the weights that a trial starts from into its model, on all ranks. Collective.

    Returns None if the experiment names none, or a checkpoint has the weights: of a resumed training, of an evaluation.

    Raises:
        ExperimentError: the weights can't be read, or don't fit the model.
    """
    start = trial.experiment.train.start_from
    if start is None or isinstance(trial, Evaluation):
        return None
    initial = broadcast_from_first(lambda: trial.initial, rank=rank)
    if initial is None:
        if isinstance(trial, Training) and trial.resume:
            return None
        raise ExperimentError.of(_KEY, "its weights were not loaded by the driver; start training with pipeline run")
    found = broadcast_from_first(lambda: fit(model, start, initial), rank=rank)
    own = model.state_dict()

    @torch.no_grad()
    def copy() -> None:
        saved = _read(initial)
        for name, source in found.taken.items():
            own[name].copy_(saved[source])

    broadcast_from_first(copy, rank=rank)
    copy_from_first([own[name] for name in found.taken], rank=rank, device=device)
    left = *found.missing, *found.misshapen
    return Loaded(source=initial.source, tensors=len(found.taken), left=left, unused=found.unused)


def fit(model: nn.Module, start: StartFrom, initial: Weights) -> Fit:
    """Compare the names and shapes of a file with those of a model, which may be on the meta device.

    Raises:
        ExperimentError: the file can't be read; or with ``strict`` they aren't the same, else have nothing in common.
    """
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
        meant = f"; did you mean {rename}?" if (rename := _likely_rename(found)) else "."
        has = f"The file has {listed(list(names.values()))}. The model has {listed(list(own))}{meant}"
        raise ExperimentError.of(_KEY, f"no tensor in {initial.source} matches the model. {has}")
    if start.strict and (problems := list(_differences(found, initial))):
        raise ExperimentError(problems)
    return found


def renamed(names: Sequence[str], rename: Mapping[str, str]) -> dict[str, str]:
    """Return the new name of each saved name; the longest beginning counts.

    Raises:
        ExperimentError: a beginning matches no name, or two tensors get the same name.
    """
    used: set[str] = set()
    found: dict[str, str] = {}
    for name in names:
        old = max((one for one in rename if _begins(name, one)), key=len, default=None)
        found[name] = name
        if old is not None:
            used.add(old)
            parts = rename[old].strip("."), name[len(old.rstrip(".")) :].strip(".")
            found[name] = ".".join(part for part in parts if part)
    beginnings = list(dict.fromkeys(".".join(name.split(".")[:depth]) for name in names for depth in (1, 2, 3)))
    problems = []
    for old in rename:
        if old not in used:
            meant = did_you_mean(old, beginnings) or f"; names start with {listed(beginnings)}"
            problems.append(
                Problem(f"{_KEY}.rename", f"{old} matches no saved name, or a longer key matches it{meant}")
            )
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
    """Yield one problem for each kind of difference, with the renaming that was probably meant."""
    meant = _likely_rename(found)
    if found.missing:
        remedy = f"; did you mean {meant}?" if meant else "; set strict: false to initialize them"
        yield Problem(_KEY, f"{initial.source} lacks {listed(found.missing)}, which the model has{remedy}")
    if found.unused:
        remedy = "" if meant and found.missing else "; set strict: false to ignore them"
        yield Problem(_KEY, f"{initial.source} has {listed(found.unused)}, which the model lacks{remedy}")
    if found.misshapen:
        shapes = listed([f"{name}: {shape}" for name, shape in found.misshapen.items()])
        remedy = "; set strict: false to initialize them"
        yield Problem(_KEY, f"{initial.source} has other shapes than the model: {shapes}{remedy}")


def _likely_rename(found: Fit) -> str:
    """Return the renaming that explains most of the missing names; empty if none does."""
    pairs: Counter[tuple[str, str]] = Counter()
    for old in found.unused[:_COMPARED]:
        for new in found.missing[:_COMPARED]:
            before, after = old.split("."), new.split(".")
            common = 0
            while common < min(len(before), len(after)) and before[-1 - common] == after[-1 - common]:
                common += 1
            if common:
                pairs[".".join(before[: len(before) - common]), ".".join(after[: len(after) - common])] += 1
    if not pairs:
        return ""
    (old, new), _ = pairs.most_common(1)[0]
    nothing = '""'
    return f"rename: {{{old or nothing}: {new or nothing}}}"


def _read(initial: Weights) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file, of a run's weights without those of its task, or of a checkpoint.

    Raises:
        ExperimentError: the file can't be read here.
    """
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
