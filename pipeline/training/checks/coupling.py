"""Coupling of a training to its ranks: layers, buffers and random numbers that depend on how they share a global batch.

Some layers are known by their type; buffers and random numbers show themselves in the first step.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from pipeline.protocol.events import Outbox, Warned
from pipeline.protocol.trial import Training
from pipeline.protocol.trial_result import BATCH_TRANSFORM, RANDOM_NUMBERS
from pipeline.training.context import TrainContext
from pipeline.training.model import frozen
from pipeline.training.model.parameter_names import listed
from pipeline.training.ranks.fingerprints import prints
from pipeline.training.ranks.randomness import generators_kept, states
from pipeline.training.ranks.rank_equality import differing
from pipeline.training.step.plain import seed


def layers(model: nn.Module) -> tuple[str, ...]:
    """Return the types of layers whose result depends on how a global batch is divided among ranks.

    Batch statistics are those of a rank's share, and each rank draws its own dropout masks.
    """
    coupled = (
        module
        for module in model.modules()
        if (isinstance(module, _BatchNorm) and not frozen.stays_in_evaluation(module))
        or (isinstance(module, _DropoutNd) and module.p > 0)
    )
    names = [type(module).__name__.removeprefix("FSDP") for module in coupled]
    recurrent = (module for module in model.modules() if isinstance(module, nn.RNNBase) and module.dropout > 0)
    names += [f"Dropout of {type(module).__name__}" for module in recurrent]
    return tuple(dict.fromkeys(names))


class Coupling:
    """Coupling besides that of layers, as the first step of this process shows it."""

    def __init__(self, context: TrainContext) -> None:
        self._context = context
        self._before: Mapping[str, str] = {}
        self.found: tuple[str, ...] = ()
        """Names of buffers, or random numbers, that depend on how ranks share a global batch."""

    def note(self) -> None:
        """Note the buffers before the first step, if each rank has several micro-batches in a step."""
        if self._context.accumulation > 1:
            self._before = prints(_buffers(self._context))

    def observe(self, outbox: Outbox, *, step: int) -> None:
        """Find what the step that was just taken shows to be coupled; warn of buffers. Collective."""
        context = self._context
        random = (RANDOM_NUMBERS,) if _has_drawn(context, step=step) else ()
        names = differing(_buffers(context), rank=context.rank)
        mixes = (BATCH_TRANSFORM,) if context.experiment.train.batch_transform is not None else ()
        self.found = (*random, *mixes, *([_listed(names)] if names else []))
        message = _explain_differing(names) if names else self._explain_changed()
        if message and context.rank.is_first and isinstance(context.trial, Training):
            outbox.event(Warned(trial=context.trial.name, message=message))

    def _explain_changed(self) -> str:
        now = prints(_buffers(self._context)) if self._before else {}
        if not (changed := [name for name, value in self._before.items() if now.get(name) != value]):
            return ""
        return (
            f"model: {_listed(changed)} {'changes' if len(changed) == 1 else 'change'} in each forward pass. With "
            f"train.gradient_accumulation this happens {self._context.accumulation} times in a step, each time for a "
            "part of the batch. If the loss depends on it, training differs from training with the whole batch. Update "
            "it once in a step, or remove train.gradient_accumulation."
        )


def _explain_differing(names: Sequence[str]) -> str:
    one = len(names) == 1
    return (
        f"model: {_listed(names)} {'differs' if one else 'differ'} between workers. Each worker updates "
        f"{'it' if one else 'them'} from its part of the batch, and only rank 0's value is saved. To use the whole "
        "batch, compute the update from pipeline.tasks.gathered(...)."
    )


def _listed(names: Sequence[str]) -> str:
    return f"{'buffer' if len(names) == 1 else 'buffers'} {listed(names)}"


def _has_drawn(context: TrainContext, *, step: int) -> bool:
    """Return True if the step has drawn random numbers: the generators are no longer as a micro-batch's seed left them.

    Not all ranks have as many micro-batches in an uneven batch.
    """
    after = states(context.device)
    with generators_kept():
        for number in range(context.accumulation):
            seed(context, step=step, number=number)
            if after == states(context.device):
                return False
    return True


def _buffers(context: TrainContext) -> dict[str, Tensor]:
    """Return the buffers of the model and of the task, but for those of layers that are known by their type.

    Ranks that update them from their own samples have different ones after a step: DDP copies the model's from rank 0
    before the next forward pass only.
    """
    modules = {"": context.model, "task.": context.learned}
    return {
        f"{prefix}{name}.{own}" if name else f"{prefix}{own}": buffer
        for prefix, whole in modules.items()
        if whole is not None
        for name, module in whole.named_modules()
        if not isinstance(module, _BatchNorm)
        for own, buffer in module.named_buffers(recurse=False)
    }
