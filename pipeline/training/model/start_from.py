"""Initial weights of ``train.start_from``: read by rank 0, compared with the model, sent to all ranks.

They are loaded before a strategy wraps or shards the model, so each rank begins with the same ones.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from pipeline.config.finetuning import StartFrom
from pipeline.errors import ExperimentError, Problem
from pipeline.protocol.events import Loaded
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Evaluation, Training, Trial, Weights
from pipeline.training.model.parameter_names import listed
from pipeline.training.ranks.collectives import copy_from_first, from_first
from pipeline.wording import did_you_mean

_KEY = "train.start_from"
_OF_A_RUN = ".pt"
_COMPARED = 200
"""Names of each side that a renaming is looked for among."""

Shapes = Mapping[str, tuple[int, ...]]


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

    @property
    def left(self) -> tuple[str, ...]:
        """Names of the model that are left as initialised."""
        return *self.missing, *self.misshapen


def load(model: nn.Module, trial: Trial, *, rank: Rank, device: torch.device) -> Loaded | None:
    """Load the weights that a trial starts from into its model, on all ranks. Collective.

    Returns None if the experiment names none, or a checkpoint has the weights: of a resumed training, of an evaluation.

    Raises:
        ExperimentError: the weights can't be read, or don't fit the model.
    """
    start = trial.experiment.train.start_from
    if start is None or isinstance(trial, Evaluation):
        return None
    initial = from_first(lambda: trial.initial, rank=rank)
    if initial is None:
        if isinstance(trial, Training) and trial.resume:
            return None
        raise ExperimentError.of(_KEY, "its weights were not loaded by the driver; start training with pipeline run")
    found = from_first(lambda: fit(model, start, initial), rank=rank)
    own = model.state_dict()
    from_first(lambda: _copy(found, Path(initial.path), into=own), rank=rank)
    copy_from_first([own[name] for name in found.taken], rank=rank, device=device)
    return Loaded(source=initial.source, tensors=len(found.taken), left=found.left, unused=found.unused)


def fit(model: nn.Module, start: StartFrom, initial: Weights) -> Fit:
    """Compare the names and shapes of a file with those of a model, which may be on the meta device.

    Raises:
        ExperimentError: the file can't be read; or with ``strict`` they aren't the same, else have nothing in common.
    """
    shapes = _shapes(Path(initial.path))
    names = renamed(list(shapes), start.rename)
    own = {name: one for name, one in model.state_dict(keep_vars=True).items() if isinstance(one, Tensor)}
    found = _compared(
        {name: tuple(one.shape) for name, one in own.items()}, {names[old]: old for old in shapes}, shapes
    )
    tied = {id(own[name]) for name in found.taken}  # such as an output that shares the embedding's weight
    found = found._replace(missing=tuple(name for name in found.missing if id(own[name]) not in tied))
    if not found.taken:
        meant = f"; did you mean {rename}?" if (rename := _likely_rename(found)) else ""
        there = f"The file has {listed(list(names.values()))}. The model has {listed(list(own))}{meant or '.'}"
        raise ExperimentError.of(_KEY, f"no tensor in {initial.source} matches the model. {there}")
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
        if old is not None:
            used.add(old)
        found[name] = name if old is None else _joined(rename[old], name[len(old.rstrip(".")) :])
    problems = [_unused_rename(old, names) for old in rename if old not in used]
    twice = [new for new, count in Counter(found.values()).items() if count > 1]
    problems += [
        Problem(f"{_KEY}.rename", f"gives several tensors the name {new}; rename one of them") for new in twice
    ]
    if problems:
        raise ExperimentError(problems)
    return found


def _begins(name: str, old: str) -> bool:
    beginning = old.rstrip(".")
    return not beginning or name == beginning or name.startswith(f"{beginning}.")


def _joined(new: str, rest: str) -> str:
    return ".".join(part for part in (new.strip("."), rest.strip(".")) if part)


def _unused_rename(old: str, names: Sequence[str]) -> Problem:
    beginnings = list(dict.fromkeys(".".join(name.split(".")[:depth]) for name in names for depth in (1, 2, 3)))
    meant = did_you_mean(old, beginnings) or f"; names start with {listed(beginnings)}"
    return Problem(f"{_KEY}.rename", f"{old} matches no saved name, or a longer key matches it{meant}")


def _compared(own: Shapes, saved: Mapping[str, str], shapes: Shapes) -> Fit:
    """Compare the shapes of a model with those of saved names, ``saved`` by new name."""
    there = {name: shapes[old] for name, old in saved.items()}
    return Fit(
        taken={name: saved[name] for name, shape in own.items() if there.get(name) == shape},
        missing=tuple(name for name in own if name not in there),
        unused=tuple(name for name in there if name not in own),
        misshapen={
            name: f"{there[name]} in the file, {shape} in the model"
            for name, shape in own.items()
            if name in there and there[name] != shape
        },
    )


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


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes by name, without the tensors."""
    with _explained(path):
        if path.suffix == _OF_A_RUN:
            return {name: tuple(one.shape) for name, one in _mapped(path).items()}
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping


@torch.no_grad()
def _copy(found: Fit, path: Path, *, into: Mapping[str, Tensor]) -> None:
    """Read the tensors one at a time, and copy them to those of a model."""
    with _explained(path):
        if path.suffix == _OF_A_RUN:
            tensors = _mapped(path)
            for name, source in found.taken.items():
                into[name].copy_(tensors[source])
            return
        with safe_open(path, framework="pt") as file:
            for name, source in found.taken.items():
                into[name].copy_(file.get_tensor(source))


def _mapped(path: Path) -> Mapping[str, Tensor]:
    saved: Mapping[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return {name: one for name, one in saved.items() if isinstance(one, Tensor)}  # not extra state


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Convert the errors of reading a file.

    Raises:
        ExperimentError: the file can't be read here.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        said = " ".join(str(error).split())[:200]
        raise ExperimentError.of(
            _KEY, f"{path} can't be read on the node of rank 0: {said}; name another file"
        ) from error
