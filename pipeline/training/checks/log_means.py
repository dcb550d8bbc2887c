"""Check that the values that a task logs are means over samples, on a few samples before the first step.

Logs are averaged over batches with the weight of the loss. So the value of a batch must be the weighted mean of the
values of its parts, which isn't so for a root, an exponential, a count or a maximum.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeline.errors import ExperimentError, Problem
from pipeline.protocol.events import Outbox, Warned
from pipeline.protocol.labels import Split
from pipeline.tasks import FromModel, LanguageModel, OwnEvaluation, Supervised
from pipeline.training.checks.batch_parts import as_it_was, has_16_bits
from pipeline.training.checks.log_values import LoggedValues, WholeAndParts
from pipeline.training.context import TrainContext
from pipeline.training.model.perturbation import perturb
from pipeline.training.ranks.collectives import gather
from pipeline.wording import figure, first_line

_log = logging.getLogger(__name__)

_DRAWS, _FEWEST_DRAWS, _DRAWS_S = 32, 8, 0.5
"""Most and fewest draws of values that draw random numbers, and the seconds after which no further one starts."""
_LIMIT_S = 3.0
"""Seconds after which no further samples or weights are tried."""
_TOLERANCE, _TOLERANCE_16_BITS = 1e-3, 5e-2
_TOLERANCE_OF_DRAWS = 0.1
"""Tolerance of values that draw random numbers: detectors that sample proposals have means but for their sampling."""
_FLOOR, _ROUNDINGS, _ERRORS = 1e-6, 8, 5
"""Difference that is rounding whatever the value, and what a mean may be off: rounding errors of its type, or standard
errors over draws."""
_SPREAD = 0.1
"""Relative difference of parts from the batch by which a root differs from a mean by more than the tolerance."""
_NOISE = (1.0, 0.1)
"""Noise on the weights; the smaller one if values aren't finite with the larger one."""
_WITHOUT_LOGS = (Supervised, FromModel, LanguageModel)
_INVERSES: Mapping[str, Callable[[Tensor], Tensor]] = {"square": torch.square, "logarithm": torch.log}

_REMEDIES: Mapping[str, str] = {
    "square": "Its square is a mean. {} the square, and take the root of the reported value",
    "logarithm": "Its logarithm is a mean. {} the logarithm, and take the exponential of the reported value",
    "": "{} a mean over the samples",
}
"""Remedies by the function of the value that is a mean."""
_METRICS: Mapping[str, tuple[str, str]] = {
    "square": ("torchmetrics.MeanSquaredError", "squared=False"),
    "logarithm": ("torchmetrics.text.Perplexity", ""),
    "": ("torchmetrics.NAME", ""),
}
"""Metrics that compute such values from all samples, and their arguments."""


class _Found(NamedTuple):
    """A value that is not a mean, as seen on a few samples."""

    name: str
    whole: float
    mean: float
    inverse: str
    """The function of the value that is a mean; empty if none is known."""


def check(context: TrainContext, outbox: Outbox) -> None:
    """Reject logs of an evaluation that aren't means over samples, and warn of those of training. Collective.

    Raises:
        ExperimentError: an evaluation logs values that aren't means, or returns such a loss of its own.
    """
    if (
        type(context.task) in _WITHOUT_LOGS or context.seen.gathers
    ):  # an evaluation gathers whole batches at any world size
        return
    try:
        with as_it_was(context) as module:
            in_training = _examine(context, module, split=None)
            has_mean_loss = all(one.name != "loss" for one in in_training)
            problems = [
                Problem("task", _rejection(split, one, context=context))
                for split in _evaluated(context)
                for one in _examine(context, module, split=split)
                if has_mean_loss or one.inverse
            ]
    except ExperimentError:
        raise
    except Exception as error:  # noqa: BLE001 - user code may raise anything
        _log.warning("the logs could not be checked", exc_info=error)
        in_training, problems = [], []
        if not context.seen.unexamined:  # which says it already
            said = f"{type(error).__name__}: {first_line(error)}"
            _warn(context, outbox, f"could not check that logs are means over the samples: {said}")
    problems = list(dict.fromkeys(one for part in gather(problems, rank=context.rank) for one in part))
    if problems:
        raise ExperimentError(problems)
    if names := [f"train/{one.name}" for one in in_training if one.name != "loss"]:
        what = f"{', '.join(names)} {'is not a mean' if len(names) == 1 else 'are not means'} over the samples"
        _warn(context, outbox, f"{what}. The reported mean depends on the number of workers and micro-batches.")


def _evaluated(context: TrainContext) -> Sequence[Split]:
    """Return the sets to check; a task without an evaluation of its own has the same values in all of them."""
    splits: tuple[Split, ...] = ("validation", "test")
    there = [split for split in splits if context.batches.has(split)]
    return there if isinstance(context.task, OwnEvaluation) else there[:1]


def _examine(context: TrainContext, module: nn.Module, *, split: Split | None) -> list[_Found]:
    """Find values that aren't means: logs, and the loss if it is that of training, or of an evaluation of its own."""
    values = LoggedValues(context, module, split=split)
    if len(values.groups[0]) < 2:
        return []
    with values.computing():
        first, names = values.whole(0, 1), values.names
        evaluates_itself = isinstance(context.task, OwnEvaluation)
        if (names == ("loss",) and not evaluates_itself) or values.is_redrawn:
            return []
        found = _Comparison(context, values).run(first)
    return [one for one in found if evaluates_itself or split is None or one.name != "loss"]


class _Comparison:
    """Comparison of the values of batches with those of their parts."""

    def __init__(self, context: TrainContext, values: LoggedValues) -> None:
        self._context, self._values = context, values
        self._started = time.monotonic()
        self._found: dict[str, _Found] = {}

    def run(self, first: Tensor) -> list[_Found]:
        """Compare samples that differ and ordinary ones, also at weights where the values differ.

        ``first``: values of the first samples under another seed than 0.
        """
        values, is_sharded = self._values, self._context.sharded is not None
        draw = values.draw(0, 0)
        is_random = bool(((draw.whole - first).abs() > self._tolerance * first.abs() + _FLOOR).any())
        if is_sharded:  # ranks compute together, so that none may compute more often
            self._judge([] if is_random else [draw])
            return list(self._found.values())
        for group in range(len(values.groups)):
            if group and not self._has_time():
                break
            draws = self._drawn(group, is_random=is_random)
            self._judge(draws)
            if not all(map(_differs, draws)):
                self._judge_at_other_weights(group, is_random=is_random)
        return list(self._found.values())

    def _judge_at_other_weights(self, group: int, *, is_random: bool) -> None:
        for noise in _NOISE:
            if not self._has_time():
                return
            with perturb(self._context.parameters, model=self._context.whole, scale=noise):
                draws = self._drawn(group, is_random=is_random)
            if all(bool(one.whole.isfinite().all() and one.parts.isfinite().all()) for one in draws):
                self._judge(draws)
                return

    def _has_time(self) -> bool:
        return time.monotonic() - self._started < _LIMIT_S

    def _drawn(self, group: int, *, is_random: bool) -> list[WholeAndParts]:
        """Compute a group once, or several times if it draws random numbers; nothing if there is no time for that."""
        draws, started = [self._values.draw(group, 0)], time.monotonic()
        while is_random and len(draws) < _DRAWS and time.monotonic() - started < _DRAWS_S:
            draws.append(self._values.draw(group, len(draws)))
        return [] if is_random and len(draws) < _FEWEST_DRAWS else draws

    @property
    def _tolerance(self) -> float:
        least = _TOLERANCE_16_BITS if has_16_bits(self._context) else _TOLERANCE
        return max(least, _ROUNDINGS * self._values.rounding)

    def _judge(self, draws: Sequence[WholeAndParts]) -> None:
        """Note the values that aren't means; those that aren't finite, or of parts without weight, show nothing."""
        if not draws or not all(bool(one.weights.all()) for one in draws):
            return
        whole = torch.stack([one.whole for one in draws]).mean(0)
        mean = torch.stack([_mean(one.parts, one.weights) for one in draws]).mean(0)
        is_mean = _is_mean(draws, _itself, tolerance=self._tolerance)
        is_nearly = _is_mean(draws, _itself, tolerance=self._tolerance, of_random=_TOLERANCE_OF_DRAWS)
        inverses = {what: _is_mean(draws, one, tolerance=self._tolerance) for what, one in _INVERSES.items()}
        for index, name in enumerate(self._values.names):
            inverse = next((what for what, are in inverses.items() if are[index]), "")
            if whole[index].isfinite() and not (is_mean[index] or (is_nearly[index] and not inverse)):
                self._found.setdefault(name, _Found(name, float(whole[index]), float(mean[index]), inverse))


def _itself(value: Tensor) -> Tensor:
    return value


def _is_mean(
    draws: Sequence[WholeAndParts], inverse: Callable[[Tensor], Tensor], *, tolerance: float, of_random: float = 0.0
) -> Tensor:
    """Return for each value whether its inverse is the mean of those of the parts, on average over draws.

    ``of_random``: larger tolerance of values that differ between draws.
    """
    whole = torch.stack([inverse(one.whole) for one in draws])
    parts = torch.stack([_mean(inverse(one.parts), one.weights) for one in draws])
    sizes = torch.stack([_mean(inverse(one.parts).abs(), one.weights) for one in draws])
    scale = torch.maximum(whole.abs(), sizes).mean(0)
    error = (whole - parts).std(0) / len(draws) ** 0.5 if len(draws) > 1 else torch.zeros_like(scale)
    relative = torch.where(error > tolerance * scale, max(tolerance, of_random), tolerance)
    is_close = (whole - parts).mean(0).abs() <= relative * scale + _ERRORS * error + _FLOOR
    return is_close & scale.isfinite()  # the logarithm of 0 shows nothing


def _differs(draw: WholeAndParts) -> bool:
    """Return True if the parts differ so much in each value that a root would show."""
    return bool(((draw.parts - draw.whole).abs().amax(0) > _SPREAD * draw.whole.abs()).all())


def _mean(parts: Tensor, weights: Tensor) -> Tensor:
    return (parts * weights[:, None]).sum(0) / weights.sum()


def _rejection(split: Split, found: _Found, *, context: TrainContext) -> str:
    """Return the message about a value of an evaluation, with the ways to write it."""
    name, (metric, arguments) = found.name, _METRICS[found.inverse]
    if isinstance(context.task, OwnEvaluation):
        use = f"log a metric, which gets all samples: self.metric = {metric}({arguments}), self.log(..., self.metric)"
    else:
        given = f", {arguments.replace('=', ': ').lower()}" if arguments else ""
        use = f"name a metric, which gets all samples: metrics: {{{name}: {{_target_: {metric}{given}}}}}"
        if not found.inverse:
            use += ". To log a value per batch, log it in training only (if model.training)"
    remedy = _REMEDIES[found.inverse].format("Return" if name == "loss" else "Log")
    seen = f"{figure(found.whole)} for a batch of samples, but the mean over its parts is {figure(found.mean)}"
    return f"{split}/{name} is not a mean over the samples. It is {seen}. {remedy}. Or {use}"


def _warn(context: TrainContext, outbox: Outbox, message: str) -> None:
    if context.rank.is_first:
        outbox.event(Warned(trial=context.trial.name, message=message))
