"""Keys of several optimizers: ``optimizers`` and ``schedulers``, by name."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from pipeline.errors import Problem
from pipeline.experiment import keys
from pipeline.experiment.finetuning import Optimizer, Pattern
from pipeline.experiment.values import Positive, PositiveFloat


class NamedOptimizer(Optimizer):
    """Optimizer with a name: ``_target_: package.name`` with keyword arguments, and the parameters that it trains."""

    params: Pattern | Annotated[tuple[Pattern, ...], Field(min_length=1)]
    """Name or names of the parameters that it trains. An asterisk matches any characters, including dots. Each
    trainable parameter belongs to exactly one optimizer. Names of the task's parameters start with ``task.``."""

    every: Positive | None = None
    """Steps between two updates. 5 updates in the first step and in every fifth step after it. The loss is computed and
    reported in all steps. Default: update in each step. Schedulers count all steps."""
    clip_grad_norm: PositiveFloat | None = None
    """Maximum norm of its gradients, instead of train.clip_grad_norm."""

    def updates_in(self, step: int) -> bool:
        """Return True if a step, counted from 0, updates its parameters."""
        return step % (self.every or 1) == 0

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns as a tuple."""
        return (self.params,) if isinstance(self.params, str) else self.params


def own_key(key: str, name: str) -> str:
    """Return the key of one of several optimizers, e.g. "optimizers.critic.lr" for "optimizer.lr"."""
    for single in ("optimizer", "scheduler"):
        if key == single or key.startswith((f"{single}.", f"{single}[")):
            return f"{keys.child(f'{single}s', name)}{key.removeprefix(single)}"
    return key


def own_problems(problems: Sequence[Problem], name: str) -> list[Problem]:
    """Return problems with the keys of one of several optimizers."""
    return [problem._replace(key=own_key(problem.key, name)) for problem in problems]
