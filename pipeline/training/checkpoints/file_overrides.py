"""A resumed training whose experiment was allowed to change: what is written now counts, not what was saved."""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pipeline.training.checkpoints.manifest import Manifest, trained
from pipeline.training.context import TrainContext
from pipeline.training.nonfinite import advance_scheduler

_MEMORY = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")
"""What a plateau scheduler has seen, as against how it was set up."""


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """The settings of optimizer and scheduler as the experiment has them, before a checkpoint's are put over them."""

    groups: list[dict[str, Any]]
    scheduler: dict[str, Any] | None
    constants: dict[str, Tensor]
    """Buffers of loss or task."""

    @classmethod
    def of(cls, context: TrainContext) -> "Overrides":
        """Those of what was just built."""
        groups = [
            {key: own for key, own in group.items() if key != "params"} for group in context.optimizer.param_groups
        ]
        return cls(
            groups=copy.deepcopy(groups),
            constants={name: one.clone() for name, one in _buffers(context).items()},
            scheduler=copy.deepcopy(context.scheduler.state_dict()) if context.scheduler is not None else None,
        )

    def put_back(self, context: TrainContext, *, manifest: Manifest, warn: Callable[[str], None]) -> None:
        """Put them over those of a checkpoint that has been restored, if the experiment differs from it.

        The scheduler is stepped to where training is: a learning rate is a function of the steps done.
        """
        now, then = trained(context.experiment), manifest.experiment
        if any(now.get(key) != then.get(key) for key in ("loss", "task")):
            for name, buffer in _buffers(context).items():
                buffer.copy_(self.constants[name])
        follows_a_metric = isinstance(context.scheduler, ReduceLROnPlateau)
        if _settings(now) == _settings(then) and (follows_a_metric or _length(now) == _length(then)):
            return
        is_another = now["optimizer"]["_target_"] != then["optimizer"]["_target_"]
        counters = set() if is_another else _counters(context.optimizer)
        for group, written in zip(context.optimizer.param_groups, self.groups, strict=True):
            group.update({key: copy.deepcopy(own) for key, own in written.items() if key not in counters})
        if is_another:
            context.optimizer.state.clear()
            warn(f"optimizer is another one than in {manifest.name}: it begins without memory of earlier gradients")
        if context.scheduler is not None and self.scheduler is not None:
            self._reschedule(context, manifest=manifest)

    def _reschedule(self, context: TrainContext, *, manifest: Manifest) -> None:
        assert context.scheduler is not None
        assert self.scheduler is not None
        restored = context.scheduler.state_dict()
        if isinstance(context.scheduler, ReduceLROnPlateau):  # it follows a metric, whose past isn't here
            seen = {key: restored[key] for key in _MEMORY}
            context.scheduler.load_state_dict({**self.scheduler, **seen})
            return
        context.scheduler.load_state_dict(self.scheduler)
        by_epoch = context.experiment.train.scheduler_interval == "epoch"
        for _ in range(manifest.epoch if by_epoch else manifest.step):
            advance_scheduler(context.scheduler, is_skipped=True)


def _counters(optimizer: Optimizer) -> set[str]:
    """What an optimizer counts in its groups, such as steps in schedule-free ones: no argument can set it."""
    return optimizer.defaults.keys() - inspect.signature(type(optimizer)).parameters.keys()


def _buffers(context: TrainContext) -> dict[str, Tensor]:
    return dict(context.learned.named_buffers()) if context.learned is not None else {}


def _settings(experiment: Mapping[str, Any]) -> tuple[Any, ...]:
    return experiment["optimizer"], experiment.get("scheduler"), experiment["train"].get("lr_scaling")


def _length(experiment: Mapping[str, Any]) -> tuple[Any, ...]:
    """What schedulers are often told."""
    return experiment["train"].get("epochs"), experiment["train"].get("scheduler_interval")
