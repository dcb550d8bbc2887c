"""State that training changes and that checkpoints do not contain, such as a counter or a list in the model.

The attributes of the user's objects are compared with their values after the build, which a resumed training and an
evaluation start from. Datasets have caches more often than state: theirs count only if a sample has changed.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

from torch import nn

from pipeline.config.targets import BUILT_IN
from pipeline.tasks import InSteps
from pipeline.training.batches.dataset_epoch import is_in_first_epoch
from pipeline.training.batches.iterable_dataset import is_iterable
from pipeline.training.checkpoints.extra_state import MetricStates, TaskState
from pipeline.training.checkpoints.state import view
from pipeline.training.context import TrainContext
from pipeline.training.model.parameter_names import listed
from pipeline.training.model.reachable_state import Attribute, find_attributes
from pipeline.training.model.several_optimizers import each_of
from pipeline.training.ranks.fingerprints import fingerprint
from pipeline.wording import first_line

KEY = "unsaved"
"""Key in a checkpoint: fingerprints of the attributes that had changed, by path."""
_SETS = ("training set", "validation set")
_ABSENT = Attribute("NoneType", "", has_graph=False)
_SET_ONCE = ("NoneType", "bool", "int", "float", "str", "tuple", "Size")
"""Types of first values that a model may replace for good in its first step, e.g. by the size of its images."""
_MODULE = "Keep such state in a buffer (register_buffer), or give the module get_extra_state and set_extra_state"
_REMEDIES = {
    "optimizer": "Keep such state in param_groups or in self.state, or return it from state_dict",
    "metrics": "Declare such state with add_state(..., persistent=True), or set it back in reset()",
    **dict.fromkeys(
        _SETS,
        "Draw from the global generators of torch, NumPy or Python, which are seeded for each sample. Let nothing "
        "depend on the samples read before",
    ),
}
_log = logging.getLogger(__name__)


class UnsavedState:
    """The attributes that a training changes and its checkpoints lack, as seen by one rank."""

    def __init__(self, context: TrainContext, *, warn: Callable[[str], None]) -> None:
        """Note the attributes after the build, before a checkpoint is restored."""
        self._context, self._warn = context, warn
        self._built = attributes(context, warn=warn)
        self._samples = {name: _first_sample(context, name) for name in _SETS}
        self._first: Mapping[str, Attribute] = {}
        self._named: set[str] = set()

    def note_first_step(self, restored: Mapping[str, str]) -> None:
        """Note the attributes after the first step; warn of those that differ from a restored checkpoint's.

        Args:
            restored: what `check` returned for the checkpoint; empty without one.
        """
        self._first = attributes(self._context, with_data=bool(restored))
        there = {name: one for name, one in restored.items() if self._first.get(name, _ABSENT).kind != "NoneType"}
        names = differing(there, self._first)
        self._named.update(names)
        for some, remedy in _by_remedy(self._context, names):
            self._warn(
                f"{listed(some)} changed before the checkpoint, which does not contain the change. The resumed run "
                f"started without it. If the loss depends on it, training differs. {remedy}."
            )

    def check(self) -> dict[str, str]:
        """Warn of attributes that have changed, once each; return the fingerprints of all of them by path."""
        varying = [name for name in _SETS if self._varies(name)]
        now = attributes(self._context, with_data=bool(varying))
        changed = [name for name, one in now.items() if self._has_changed(name, one, varying=varying)]
        kept = {f"metrics.{name}" for name in MetricStates(self._context).state_dict()}  # for resuming
        named = self._named | kept
        new = [name for name in changed if name not in named and not self._is_set_once(name, now[name])]
        new += [name for name in varying if not any(one.startswith(name) for one in (*changed, *self._named))]
        self._named.update(new)
        for names, remedy in _by_remedy(self._context, new):
            kinds = [f"{name} ({now[name].kind})" if name in now else name for name in names]
            self._warn(f"{listed(kinds)} {_consequence(names[0])}. {remedy}.")
        return {name: now[name].digest for name in changed}

    def _has_changed(self, name: str, now: Attribute, *, varying: Sequence[str]) -> bool:
        if name.startswith(_SETS) and not name.startswith(tuple(varying)):
            return False
        # What the step left with its graph is an output that is kept to be looked at, such as an attention map.
        is_output = self._first.get(name, now).has_graph
        return not is_output and now.digest != self._built.get(name, _ABSENT).digest and bool(self._built)

    def _is_set_once(self, name: str, now: Attribute) -> bool:
        """Return True for a value that the first step set for good, which it sets again where it is missing."""
        is_constant = name in self._first and self._first[name].digest == now.digest
        return is_constant and self._built.get(name, _ABSENT).kind in _SET_ONCE

    def _varies(self, name: str) -> bool:
        """Return True if a dataset's first sample has changed, although it is read with the same seed."""
        if any(one.startswith(name) for one in self._named):
            return True  # without reading again, which would advance its generator
        before = self._samples[name]
        if before is None or not is_in_first_epoch(dict(_datasets(self._context))[name]):
            return False  # set_epoch may change its samples
        return before != _first_sample(self._context, name)


def attributes(
    context: TrainContext, *, with_data: bool = True, warn: Callable[[str], None] = lambda _: None
) -> dict[str, Attribute]:
    """Return the attributes of the experiment's objects that checkpoints lack, by path; empty if some can't be read.

    Args:
        context: the training.
        with_data: True to include those of the datasets, which may hold long lists.
        warn: receives a warning if some can't be read.
    """
    task = TaskState(context)
    key = "loss" if context.experiment.task is None else "task"
    roots: dict[str, object] = {"model": context.model} | ({} if task.saves_itself else {key: task.part})
    roots |= {f"optimizer {name}".rstrip(): one for name, one in _optimizers(context)}
    roots |= {f"metrics.{name}": one for name, one in (vars(context).get("metrics") or {}).items()}
    roots |= dict(_datasets(context)) if with_data else {}
    packages = [name for name in context.trial.allowed if name not in BUILT_IN]
    try:
        # What begin_step sets is set again before each step of a resumed training, and before an evaluation.
        names = type(task.part).begin_step.__code__.co_names if isinstance(task.part, InSteps) else ()
        # An evaluation starts without the states of metrics, which it adds to.
        saved = [one for name, one in view(context).tensors.items() if not name.startswith("metrics/")]
        return find_attributes(roots, saved=saved, skipped={key: names}, packages=packages)
    except Exception as error:  # noqa: BLE001 - user code may raise anything, in repr or len; no reason to stop
        _log.warning("the attributes of the experiment's objects can't be compared", exc_info=error)
        warn(
            f"could not check for state outside of checkpoints. Reading the attributes of the experiment's objects "
            f"raised {type(error).__name__}: {first_line(error)}. A resumed run may differ."
        )
        return {}


def differing(saved: Mapping[str, str], now: Mapping[str, Attribute]) -> list[str]:
    """Return the names of attributes that differ from those that a checkpoint has fingerprints of."""
    return [name for name, digest in saved.items() if now and now.get(name, _ABSENT).digest != digest]


def differing_values(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the names of attributes whose fingerprints differ, without those of datasets."""
    names = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    return [name for name in names if not name.startswith(_SETS)]


def describe_stale_model(context: TrainContext, saved: Mapping[str, str]) -> str:
    """Return a sentence on attributes of the model that a restored checkpoint lacks; empty if there are none."""
    names = [name for name in differing(saved, attributes(context, with_data=False)) if name.startswith("model.")]
    if not names:
        return ""
    return (
        f"{listed(names)} changed before the checkpoint, which does not contain the change. If outputs depend on it, "
        f"the outputs of the exported model differ from training. {_MODULE}"
    )


def find_stale(context: TrainContext, saved: Mapping[str, str], *, split: str) -> list[str]:
    """Return sentences on what an evaluation used as it was built, although training had changed it; one by remedy."""
    others = tuple(name for name in _SETS if not name.startswith(split))
    names = [name for name in differing(saved, attributes(context)) if not name.startswith(others)]
    return [
        f"{listed(some)} changed before the checkpoint, which does not contain the change. The evaluation ran "
        f"without it. If outputs depend on it, the results differ from training. {remedy}"
        for some, remedy in _by_remedy(context, names)
    ]


def _consequence(name: str) -> str:
    if name.startswith(_SETS):
        return (
            "changes: its first sample differs when read again with the same seed. A resumed run and `pipeline "
            "evaluate` read other samples"
        )
    return (
        "changed in training, and checkpoints do not contain the change. A resumed run and `pipeline evaluate` start "
        "without it. If the loss or an output depends on it, their results differ"
    )


def _by_remedy(context: TrainContext, names: Sequence[str]) -> Iterator[tuple[list[str], str]]:
    """Yield the names that have the same remedy, with the remedy."""
    part = TaskState(context).part
    key = "loss" if context.experiment.task is None else "task"
    own = _MODULE if isinstance(part, nn.Module) else f"Give the {key} the methods state_dict and load_state_dict"
    remedies = _REMEDIES | {key: own}

    def remedy(name: str) -> str:
        return next((text for root, text in remedies.items() if name.startswith(root)), _MODULE)

    for text, some in groupby(sorted(names, key=remedy), remedy):
        yield list(some), text


def _optimizers(context: TrainContext) -> Iterator[tuple[str, object]]:
    names = context.experiment.optimizers or ("",)
    yield from zip(names, each_of(context.optimizer), strict=True)


def _datasets(context: TrainContext) -> Iterator[tuple[str, object]]:
    """Yield the datasets by name, without iterable ones, which resuming compares by their samples."""
    for name, dataset in zip(_SETS, context.batches.datasets, strict=False):
        if dataset is not None and not is_iterable(dataset):
            yield name, dataset


def _first_sample(context: TrainContext, name: str) -> str | None:
    """Return the fingerprint of a dataset's first sample; None of an iterable one, and if it can't be read."""
    if name not in dict(_datasets(context)):
        return None
    try:
        return fingerprint(context.batches.read([0], validation=name == _SETS[1]))
    except Exception as error:  # noqa: BLE001 - user code may raise anything; training reports what it needs itself
        _log.warning("the first sample of the %s can't be read again", name, exc_info=error)
        return None
