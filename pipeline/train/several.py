"""A step of several optimizers, as of a GAN: the task calls ``update(name, loss)`` for each, in its order.

Not through DDP: a loss has gradients only for its optimizer's parameters, which are summed over the ranks at once. So
the task sees equal updated weights on all ranks, and each update is of the whole global batch.
"""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.errors import ExperimentError
from pipeline.experiment.reported import GRADIENT_NORM, LEARNING_RATE, LOSS, OF_GROUP
from pipeline.protocol.events import Phase
from pipeline.tasks import Loss, describe, gathering
from pipeline.train import errors
from pipeline.train.checks import check_losses_given
from pipeline.train.evaluate import share_buffers
from pipeline.train.order import mix, seed_all
from pipeline.train.ranks import total_norm
from pipeline.train.state import State, Stepped
from pipeline.train.trainer import Stream, call_before_update, clip, observe
from pipeline.train.watch import mark

if TYPE_CHECKING:
    from pipeline.train.order import MicroBatch


def train_step(s: State, stream: Stream, *, step: int, exchange: bool = True, update: bool = True) -> Stepped:
    """Let the task compute and update, loss by loss; see `pipeline.train.trainer.train_step`.

    A loss whose optimizer doesn't update in this step is only computed. There are no micro-batches: the task would have
    to run in all of them at once.
    """
    s.begin_step(step)
    mark(Phase.READING)
    part, batch = next(stream)
    seed = mix(s.seed, "step", step, s.rank.rank, 0)
    seed_all(seed, s.device, others=s.facts is None or s.facts.draws_others)
    exchanges = exchange and s.rank.world_size > 1
    if exchanges:
        share_buffers(s)  # as DDP does before each pass
    with s.schedules.warm_up(step) as rates:
        updates = _Updates(s, part, step=step, exchanges=exchanges, updates=update)
        try:
            mark(Phase.FORWARD)
            if s.device.type == "cpu":  # a GPU's batches were copied to it in advance
                batch = s.batches.place(batch)
            gathering.current.begin(s, part, exchange=exchange)
            with s.autocast():
                found = s.trainee.with_updates(batch, updates)
        except Exception as error:
            errors.explain(error, s, batch, part)
            raise
    sums = updates.finish(found)
    if s.facts is None:
        logs = {name: value for name, value in sums.items() if name != LOSS}
        s.facts = observe(s, part, Loss(sums[LOSS], logs=logs), seed=seed)
    if not update:
        return Stepped(sums, None, {}, {})
    s.scaler.update()
    s.schedules.step(may_skip=s.scaler.is_enabled() and not step)
    for hook in s.hooks:
        hook.after_step(s)
    of_each = f"{LEARNING_RATE}_"
    used = {name: rate for name, rate in rates.items() if not name.startswith(of_each) or name in updates.rates}
    return Stepped(sums, None, updates.norms, used)


class _Updates:
    """The function ``update`` of one step."""

    def __init__(self, s: State, part: "MicroBatch", *, step: int, exchanges: bool, updates: bool) -> None:
        self._s, self._part, self._step, self._exchanges, self._updates = s, part, step, exchanges, updates
        self._share = part.weight * len(part.indices)
        self._sums: dict[str, Tensor] = {}
        self._names: list[str] = []
        self.norms: dict[str, Tensor] = {}
        self.rates: set[str] = set()

    def __call__(self, name: str, loss: Tensor) -> None:
        """Update the parameters of an optimizer by its loss, the mean over the samples of this rank's batch."""
        s, part = self._s, self._part
        self._check(name, loss)
        key, value = f"loss_{name}", (loss.detach() * self._share).to(s.loss_dtype)
        self._sums[key] = self._sums[key] + value if key in self._sums else value
        declared, own, optimizer = s.experiment.optimizers[name], s.parameters[name], s.optimizers[name]
        if not declared.updates_in(self._step):
            return
        mark(Phase.BACKWARD)
        s.gradients_of = name
        if loss.requires_grad:
            loss = gathering.current.reaching_rows(loss)
        factor = loss.new_full((), self._share / part.global_size)
        with torch.autocast(s.device.type, enabled=False):
            if loss.requires_grad:
                s.scaler.scale(loss).backward(factor, inputs=own)  # type: ignore[no-untyped-call]
            if not loss.requires_grad or not s.gradients:
                message = f"gave a loss that does not depend on any parameter of optimizers.{name}; remove a detach() "
                raise ExperimentError.of("task", f"{message}or no_grad(), or correct optimizers.{name}.params")
            if self._exchanges:
                _sum_gradients(own, device=s.device)
            if not self._updates:
                return
            mark(Phase.UPDATING)
            limit = declared.clip_grad_norm or s.experiment.train.clip_grad_norm
            if s.hooks or limit is not None:
                s.scaler.unscale_(optimizer)
            call_before_update(s, self._step)
            if limit is not None:
                self.norms[f"{GRADIENT_NORM}_{name}"] = norm = total_norm(s.gradients, device=s.device)
                clip(own, limit, norm)
            s.scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
        rate = f"{LEARNING_RATE}_{name}"
        self.rates |= {rate, *(f"{rate}{OF_GROUP}{n}" for n in range(1, len(optimizer.param_groups)))}
        mark(Phase.FORWARD)

    def finish(self, found: Loss) -> dict[str, Tensor]:
        """Return the sums of the loss, the optimizers' losses and the task's logs, once the task is over."""
        s = self._s
        check_losses_given(s, self._names)
        s.losses_of = tuple(self._names)
        taken = {f"{metric}_{name}" for metric in (LOSS, LEARNING_RATE, GRADIENT_NORM) for name in self._names}
        if clashing := taken.intersection(found.logs):
            message = f"logs {min(clashing)}, which is already reported; choose another name"
            raise ExperimentError.of("task", message)
        sums = {LOSS: torch.stack(list(self._sums.values())).sum(), **self._sums}
        if self.norms and s.experiment.train.clip_grad_norm is not None:
            self.norms[GRADIENT_NORM] = torch.stack([norm.square() for norm in self.norms.values()]).sum().sqrt()
        return sums | {name: (log.detach() * self._share).to(s.loss_dtype) for name, log in found.logs.items()}

    def _check(self, name: str, loss: object) -> None:
        s, message = self._s, ""
        self._names.append(name)
        if name not in s.experiment.optimizers:
            message = f"for optimizer {name!r}; use one of {', '.join(s.experiment.optimizers)}"
        elif not isinstance(loss, Tensor) or loss.ndim:
            message = f"with {describe(loss)} as the loss; it must be a scalar, the mean over the samples"
        elif s.losses_of and tuple(self._names) != s.losses_of[: len(self._names)]:
            message = f"for {', '.join(self._names)}, but for {', '.join(s.losses_of)} in the first batch; give the "
            message += "same losses for every batch"
        if message:
            raise ExperimentError.of("task", f"called update {message}")


@torch.no_grad()
def _sum_gradients(parameters: list[nn.Parameter], *, device: torch.device) -> None:
    """Sum gradients over all ranks; a parameter without one on any rank stays without: it would be let decay."""
    for dtype in dict.fromkeys(one.dtype for one in parameters):
        chosen = [one for one in parameters if one.dtype == dtype]
        own = [torch.zeros_like(one) if one.grad is None else one.grad.to_dense() for one in chosen]
        has = torch.tensor([one.grad is not None for one in chosen], dtype=dtype, device=device)
        flat = torch.cat([*(one.reshape(-1) for one in own), has])
        dist.all_reduce(flat)
        *sums, seen = torch.split(flat, [*(one.numel() for one in chosen), len(chosen)])
        for index, (parameter, total) in enumerate(zip(chosen, sums, strict=True)):
            if parameter.grad is not None or seen[index]:
                parameter.grad = total.view_as(parameter).clone()
