"""Several optimizers and their schedulers, each with its own parameters; checkpoints and measuring see them as one."""

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import override

from pipeline.config.named_optimizers import NamedOptimizer, own_problems
from pipeline.config.schema import Experiment
from pipeline.config.values import Create
from pipeline.errors import ExperimentError, Problem
from pipeline.training.model import parameter_groups, parts
from pipeline.training.model.optimizers import has_modes
from pipeline.training.model.parameter_names import Named, listed, matches, unmatched, without_match


class Optimizers(Optimizer):
    """Several optimizers by name, joined: parameter groups and states are theirs, one optimizer after the other."""

    def __init__(self, named: Mapping[str, Optimizer]) -> None:
        """Join the optimizers; torch's own constructor would want parameters."""
        self.named = dict(named)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Parameter groups of all of them."""
        return [group for one in self.named.values() for group in one.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """States of all of them by parameter: a new dict, so clear the state of `each_of` them."""
        return {parameter: own for one in self.named.values() for parameter, own in one.state.items()}

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.named.values():
            one.zero_grad(set_to_none)

    @override
    def state_dict(self) -> dict[str, Any]:
        joined: dict[str, Any] = {"state": {}, "param_groups": []}
        for one, numbers in self._numbered():
            own = one.state_dict()
            joined["state"] |= {numbers[number]: state for number, state in own["state"].items()}
            joined["param_groups"] += [
                {**group, "params": [numbers[number] for number in group["params"]]} for group in own["param_groups"]
            ]
        return joined

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        groups = list(state_dict["param_groups"])
        if len(groups) != len(self.param_groups):
            raise ValueError(f"it has {len(groups)} parameter groups, not {len(self.param_groups)}")
        for one, numbers in self._numbered():
            states = {number: own for number, own in state_dict["state"].items() if number in numbers}
            own_groups = [groups.pop(0) for _ in one.param_groups]
            one.load_state_dict({"state": states, "param_groups": own_groups})

    def _numbered(self) -> Iterator[tuple[Optimizer, range]]:
        """Yield each optimizer with the numbers of its parameters."""
        start = 0
        for one in self.named.values():
            count = sum(len(group["params"]) for group in one.param_groups)
            yield one, range(start, start + count)
            start += count


class Schedulers(LRScheduler):
    """Schedulers of several optimizers by name, which advance together."""

    def __init__(self, named: Mapping[str, LRScheduler]) -> None:
        """Join the schedulers; torch's own constructor would want an optimizer."""
        self.named = dict(named)

    @override
    def step(self, epoch: int | None = None) -> None:
        for one in self.named.values():
            one.step()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {name: one.state_dict() for name, one in self.named.items()}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if missing := sorted(state_dict.keys() ^ self.named.keys()):
            raise ValueError(
                f"the scheduler of {missing[0]} is either in the experiment or in the checkpoint, not in both"
            )
        for name, one in self.named.items():
            one.load_state_dict(state_dict[name])


def each_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that are joined in one, or the single one."""
    return list(optimizer.named.values()) if isinstance(optimizer, Optimizers) else [optimizer]


def build_optimizer(
    create: Create, experiment: Experiment, *, model: nn.Module, learned: nn.Module | None, is_sharded: bool
) -> Optimizer:
    """Build the optimizer of an experiment, or the several that it has, joined; see `parts.optimizer`.

    Raises:
        ExperimentError: one can't be built or train its parameters, or the parameters aren't divided among them.
    """
    if not experiment.optimizers:
        return parts.optimizer(create, experiment, model=model, learned=learned, is_sharded=is_sharded)
    chosen = assign(model, experiment.optimizers, learned=learned)
    optimizers: dict[str, Optimizer] = {}
    for name, own in experiment.by_optimizer.items():
        with _keys_of(name):
            optimizer = parts.optimizer(create, own, model=model, learned=learned, chosen=chosen[name])
            if has_modes(optimizer):
                message = f"{type(optimizer).__name__} keeps a second set of weights, so it can't be one of several"
                raise ExperimentError.of("optimizer", f"{message} optimizers; use another, e.g. torch.optim.Adam")
        optimizers[name] = optimizer
    return Optimizers(optimizers)


def build_scheduler(
    create: Create, experiment: Experiment, *, optimizer: Optimizer, validates: bool, advances: int
) -> LRScheduler | None:
    """Build the scheduler of an experiment, or those of several optimizers, joined; see `parts.scheduler`.

    Raises:
        ExperimentError: one can't be built, or doesn't fit the training.
    """
    if not isinstance(optimizer, Optimizers):
        return parts.scheduler(create, experiment, optimizer=optimizer, validates=validates, advances=advances)
    schedulers: dict[str, LRScheduler] = {}
    for name, own in experiment.by_optimizer.items():
        with _keys_of(name):
            one = optimizer.named[name]
            scheduler = parts.scheduler(create, own, optimizer=one, validates=validates, advances=advances)
            if isinstance(scheduler, ReduceLROnPlateau):
                message = "is a ReduceLROnPlateau, which is not supported with several optimizers"
                raise ExperimentError.of("scheduler", f"{message}; use another scheduler")
        if scheduler is not None:
            schedulers[name] = scheduler
    return Schedulers(schedulers) if schedulers else None


def divide(model: nn.Module, experiment: Experiment, *, learned: nn.Module | None) -> None:
    """Check the patterns of several optimizers and of their groups.

    Raises:
        ExperimentError: they don't divide the parameters.
    """
    chosen = assign(model, experiment.optimizers, learned=learned)
    for name, optimizer in experiment.optimizers.items():
        with _keys_of(name):
            parameter_groups.divide(model, optimizer.groups, learned=learned, chosen=chosen[name])


def assign(
    model: nn.Module, optimizers: Mapping[str, NamedOptimizer], *, learned: nn.Module | None
) -> dict[str, Container[int]]:
    """Divide the trainable parameters of model and task among the optimizers: ids of parameters by name.

    Raises:
        ExperimentError: a pattern matches no parameter, an optimizer has none to train, or a parameter is in several
            optimizers or in none.
    """
    named = parameter_groups.all_named(model, learned)
    chosen = {
        name: {id(one) for own, one in named.items() if matches(optimizer.patterns, own) and one.requires_grad}
        for name, optimizer in optimizers.items()
    }
    if problems := [*_unmatched(optimizers, named), *_misdivided(optimizers, named, chosen)]:
        raise ExperimentError(problems)
    return dict(chosen)


def _unmatched(optimizers: Mapping[str, NamedOptimizer], named: Named) -> Iterator[Problem]:
    for name, optimizer in optimizers.items():
        for pattern in without_match(optimizer.patterns, list(named)):
            yield Problem(f"optimizers.{name}.params", unmatched(pattern, list(named)))


def _misdivided(
    optimizers: Mapping[str, NamedOptimizer], named: Named, chosen: Mapping[str, set[int]]
) -> Iterator[Problem]:
    owners = {own: [name for name in chosen if id(one) in chosen[name]] for own, one in named.items()}
    for name, optimizer in optimizers.items():
        others = [own for own, names in owners.items() if name in names[1:]]
        if others:
            message = f"{listed(others)} {_are(others)} also in optimizers.{owners[others[0]][0]}.params"
            yield Problem(f"optimizers.{name}.params", f"{message}; use patterns that don't overlap")
        elif not chosen[name] and not without_match(optimizer.patterns, list(named)):
            message = f"is {', '.join(optimizer.patterns)}, but all parameters that it matches are frozen"
            yield Problem(f"optimizers.{name}.params", f"{message}; remove the optimizer")
    rest = [own for own, names in owners.items() if not names and named[own].requires_grad]
    if rest and not any(_unmatched(optimizers, named)):
        message = f"{listed(rest)} {_are(rest)} in none of {', '.join(optimizers)}. Add a pattern to params, or freeze"
        yield Problem("optimizers", f"{message} with train.freeze the parameters that aren't trained.")


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


@contextmanager
def _keys_of(name: str) -> Iterator[None]:
    """Give problems inside the block the keys of one of several optimizers."""
    try:
        yield
    except ExperimentError as error:
        raise ExperimentError(own_problems(error.problems, name)) from error.__cause__
