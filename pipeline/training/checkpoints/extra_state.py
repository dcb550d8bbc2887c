"""State that task, loss and metrics save by themselves: torch's extra state, or their own ``state_dict``.

Their parameters and buffers are saved in any case; the model's ``state_dict`` has the extra state of the model.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from pipeline.tasks import Supervised
from pipeline.training.batches.iterable_dataset import offers_state
from pipeline.training.context import TrainContext
from pipeline.training.model.learned import held_by


class TaskState:
    """The state that the task, or the loss without one, saves by itself."""

    def __init__(self, context: TrainContext) -> None:
        self.part: Any = context.task.loss if isinstance(context.task, Supervised) else context.task
        """The object of the user."""
        self.saves_itself = offers_state(self.part) and not isinstance(self.part, nn.Module)
        """True for an object with ``state_dict`` and ``load_state_dict`` that is not a module."""
        self._modules = {
            f"module/{name}": module
            for name, module in held_by(context.task).named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state by origin; empty without any."""
        if self.saves_itself:
            return {"itself": self.part.state_dict()}
        return {name: module.get_extra_state() for name, module in self._modules.items()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, as far as the task still has it."""
        if self.saves_itself and "itself" in saved:
            self.part.load_state_dict(saved["itself"])
        for name in self._modules.keys() & saved.keys():
            self._modules[name].set_extra_state(saved[name])


class MetricStates:
    """The persistent states of the metrics."""

    def __init__(self, context: TrainContext) -> None:
        self._context = context

    def state_dict(self) -> dict[str, Any]:
        """Return the states by name; empty before the metrics are built, which takes seconds."""
        built = vars(self._context).get("metrics")
        return dict(built.state_dict()) if built is not None else {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, as far as the metrics still have it."""
        if saved and self._context.metrics is not None:
            self._context.metrics.load_state_dict(saved, strict=False)
