"""The loop and the step of a training, whole. Start here.

Every rank runs this code on its share of each global batch, whichever launcher started its process.
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_
from torch.random import fork_rng

from pipeline.errors import ExperimentError, Stopped
from pipeline.experiment.reported import GRADIENT_NORM
from pipeline.protocol.events import Phase
from pipeline.protocol.trial import Training
from pipeline.tasks import Loss, gathering
from pipeline.train import checks, errors, report
from pipeline.train.checkpoint import Checkpoints
from pipeline.train.evaluate import prepare, validate
from pipeline.train.hooks import Hook
from pipeline.train.kept import Buffers
from pipeline.train.meter import Meter
from pipeline.train.nonfinite import check_weights
from pipeline.train.order import MicroBatch, has_drawn_since, mix, seed_all
from pipeline.train.ranks import gather, local, total_norm
from pipeline.train.state import Facts, State, Stepped
from pipeline.train.watch import mark, mark_step

Stream = Iterator[tuple[MicroBatch, Any]]  # A rank's micro-batches with their data, in order
_NOTHING = nullcontext()


def train(s: State, meter: Meter, checkpoints: Checkpoints) -> None:
    """Train to the last step, from step ``s.step`` on: epoch, batch and random numbers follow from it. Collective."""
    s.wrapped.train()
    minutes = s.experiment.train.minutes
    first, trains = s.step, isinstance(s.trial, Training)
    first_step = checks.FirstStep(s)
    stream = meter.timed(s.batches.stream(s.step, last_step=s.steps))
    meter.resume()
    while not s.is_over:
        mark_step(s.step)
        stepped = s.train_step(s, stream, step=s.step)
        s.step += 1
        mark(Phase.REPORTING)
        meter.add(stepped)  # its values stay on the device
        if s.ends_epoch:
            s.schedules.end_epoch()
        if s.step == first + 1:
            report.first_step(s)
            with meter.pause():
                first_step.check()
                prepare(s)
        # Three times a second, where an evaluation or a checkpoint is due, and when a hook has ended the training.
        if not (meter.is_due(s.step) or s.stop_reason):
            continue
        meter.flush()  # the one exchange: losses of all ranks, the request to stop, the clocks
        if not trains:
            continue
        checks.check_trainable(s)
        if minutes is not None and meter.trained_s >= 60 * minutes:
            s.stop_reason = (
                f"train.minutes: {minutes:g} min of training steps are over. How many steps fit differs from run to run"
            )
        saves = s.is_over or s.ends_epoch or meter.stop_agreed or checkpoints.is_due()
        if evaluates := s.evaluates() or saves:
            check_weights(s)
            values = validate(s, meter) if s.evaluates() else {}
            best = values.get(s.experiment.checkpoint.best or "")
            if saves or best is not None or s.is_over:  # an evaluation may have ended the training
                mark(Phase.SAVING)
                checkpoints.save(metric=best)  # copies, and writes in a thread
        if meter.stop_agreed:
            raise Stopped
        if evaluates:
            meter.resume()


def train_step(s: State, stream: Stream, *, step: int, exchange: bool = True, update: bool = True) -> Stepped:
    """Train on this rank's next micro-batches, those of one global batch, and update the weights once.

    The gradients are those of the global batch's sum, divided by its samples, or by its items once all ranks know them.
    Without ``exchange`` ranks send each other nothing; without ``update`` the gradients stay as they are.
    """
    train, strategy, facts = s.experiment.train, s.strategy, s.facts
    skips = train.on_nonfinite == "skip"
    buffers = Buffers(s.trainee) if skips and update else None
    s.begin_step(step)
    s.outputs.clear()
    sums: dict[str, Tensor] = {}
    count: Tensor | None = None
    summing: dist.Work | None = None
    mark(Phase.READING)
    for number, (part, batch) in enumerate(stream):
        mark(Phase.FORWARD)
        seed = mix(s.seed, "step", step, s.rank.rank, number)
        seed_all(seed, s.device, others=facts is None or facts.draws_others)  # after reading, which may draw
        try:
            if s.device.type == "cpu":  # a GPU's batches were copied to it in advance
                batch = s.batches.place(batch)
            placed = batch
            for hook in s.hooks:
                batch = hook.transform(batch)
            if batch is not placed and facts is None:
                checks.check_transformed(s, placed, batch)
            gathering.current.begin(s, part, exchange=exchange)
            # Gradients are exchanged while a step's last backward pass computes them.
            alone = strategy.no_sync if exchange else strategy.no_communication
            with _NOTHING if exchange and part.is_last else alone(s.wrapped):
                with s.autocast(), _NOTHING if facts is not None else errors.refuse_broadcasts():
                    loss: Loss = s.wrapped(batch)  # task(model, batch)
                if facts is None:
                    facts = s.facts = observe(s, part, loss, seed=seed)
                if loss.count is not None:
                    s.batches.skip_row_checks()  # a collate may drop samples, as the loss counts its items itself
                    own = loss.count if part.weight == 1 else loss.count * part.weight
                    count = own if count is None else count + own
                    if part.is_last:
                        count = count.to(s.device, s.loss_dtype, copy=True)
                        if exchange and s.rank.world_size > 1:  # while the gradients are computed
                            summing = dist.all_reduce(count, async_op=True)
                total = gathering.current.reaching_rows(loss.sum)
                checks.check_graph(s, total)
                # The first gradient of the backward pass, instead of a product with the loss; 0 for padding.
                share = part.weight * strategy.gradient_scale / (part.global_size * facts.items_per_sample)
                factor = total.new_full((), share)
                if skips:  # an infinite loss with finite gradients reaches all ranks as a gradient of NaN
                    factor = factor + 0 * total.detach()
                mark(Phase.BACKWARD)
                s.scaler.scale(total).backward(factor)  # type: ignore[no-untyped-call]
        except Exception as error:
            errors.explain(error, s, batch, part)
            raise
        if part.weight:
            items = len(part.indices) if loss.count is None else loss.count
            logged = ((name, log.detach() * items) for name, log in loss.logs.items())
            for name, value in (("loss", loss.sum.detach()), *logged):
                value = value.to(s.loss_dtype, copy=s.copies)
                sums[name] = sums[name] + value if name in sums else value
            if s.trainee.keeps_outputs:
                s.outputs.append((loss.outputs, loss.targets))
        if part.is_last:
            break  # the stream continues with the next step
        mark(Phase.READING)
    assert facts is not None  # each step has a micro-batch
    if not sums:  # this rank had padding only
        sums = {name: loss.sum.new_zeros((), dtype=s.loss_dtype) for name in ("loss", *facts.log_names)}
    if exchange:
        strategy.complete(s.parameters[""])
    gradients = s.gradients  # of which completing may have added some
    if count is not None:
        if summing is not None:
            summing.wait()
        rescale(gradients, torch.where(count > 0, part.global_size * facts.items_per_sample / count, 0.0))
    if not update:
        return Stepped(sums, count, {}, {})
    mark(Phase.UPDATING)
    optimizer, norms, skipped = s.optimizers[""], dict[str, Tensor](), False
    scale = s.scaler.get_scale() if skips else 1.0
    if s.hooks or train.clip_grad_norm is not None or skips:  # hooks may read gradients
        s.scaler.unscale_(optimizer)
    if call_before_update(s, step):
        gradients = s.gradients  # a hook may have put other tensors in their place
    if train.clip_grad_norm is not None or skips:
        norm = total_norm(gradients, device=s.device)
        if train.clip_grad_norm is not None:
            clip(s.parameters[""], train.clip_grad_norm, norm)
            norms[GRADIENT_NORM] = norm
        skipped = skips and not s.scaler.is_enabled() and not bool(torch.isfinite(norm))
    with s.schedules.warm_up(step) as rates:
        if not skipped:
            s.scaler.step(optimizer)  # leaves out steps of fp16 whose gradients overflow
    s.scaler.update()
    skipped = skipped or (skips and s.scaler.get_scale() < scale)
    optimizer.zero_grad(set_to_none=True)
    if skipped and buffers is not None:
        buffers.restore()
    s.schedules.step(may_skip=skipped or (s.scaler.is_enabled() and not step))
    for hook in s.hooks:
        hook.after_step(s)
    return Stepped(sums, count, norms, rates, skipped)


def call_before_update(s: State, step: int) -> bool:
    """Let hooks read or change the gradients; return True if one may have.

    torch's generators draw the same numbers there on all ranks, whose weights would else differ.
    """
    hooks = [hook for hook in s.hooks if type(hook).before_update is not Hook.before_update]
    if not hooks:
        return False
    with fork_rng([s.device.index] if s.device.type == "cuda" else []):
        if not s.is_sharded:  # ranks have different shards, which are to get different numbers
            seed_all(mix(s.seed, "update", step), s.device, others=False)
        for hook in hooks:
            hook.before_update(s)
    return True


def observe(s: State, part: MicroBatch, loss: Loss, *, seed: int) -> Facts:
    """Return what the first forward pass of all ranks shows, see `Facts`. Collective."""
    items = float(loss.count) * part.weight if loss.count is not None else 0.0
    own = (items, len(part.indices) * part.weight, *has_drawn_since(seed), gathering.current.is_used, tuple(loss.logs))
    counted, found = zip(*gather((loss.count is not None, own), rank=s.rank), strict=True)
    if len(set(counted)) > 1:
        raise ExperimentError.of(
            "task", "returns Loss.count on some ranks and None on others; return it for all or none"
        )
    counts, samples, draws, others, gathers, names = zip(*found, strict=True)
    checks.check_log_names(dict(enumerate(names)))
    per_sample = 2.0 ** round(math.log2(sum(counts) / sum(samples))) if sum(counts) > 0 else 1.0
    return Facts(any(draws) or any(others), any(others), per_sample, any(gathers), names[0])


@torch.no_grad()
def rescale(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place: dense ones, sparse ones, or this rank's shards."""
    dense = [own for one in gradients if not (own := local(one)).is_sparse]
    for device in dict.fromkeys(one.device for one in dense):
        torch._foreach_mul_([one for one in dense if one.device == device], factor.to(device))
    for one in gradients:
        if one.is_sparse:
            one.mul_(factor)


def clip(parameters: list[torch.nn.Parameter], limit: float, norm: Tensor) -> None:
    """Clip gradients to a norm; torch can't clip sharded ones and whole ones together."""
    for is_sharded in (True, False):
        if chosen := [one for one in parameters if hasattr(one, "device_mesh") is is_sharded]:
            clip_grads_with_norm_(chosen, limit, norm)
