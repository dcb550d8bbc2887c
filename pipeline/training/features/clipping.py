"""Clipping of gradients to a norm (``train.clip_grad_norm``, and the same key of one of several optimizers)."""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_
from typing_extensions import override

from pipeline.config.reported import GRADIENT_NORM
from pipeline.training.context import TrainContext
from pipeline.training.feature import Feature
from pipeline.training.model.parameter_set import ParameterSet
from pipeline.training.step.plain import Parts


class Clipping(Feature):
    """Clipping of gradients; reports their norm before."""

    def __init__(self, training: TrainContext, *, limits: Mapping[str, float]) -> None:
        self._training, self._limits = training, limits
        self._norms: dict[int, dict[str, Tensor]] = {}

    @override
    @classmethod
    def of(cls, training: TrainContext) -> Self | None:
        shared, several = training.experiment.train.clip_grad_norm, training.experiment.optimizers
        own = {name: one.clip_grad_norm or shared for name, one in several.items()} if several else {"": shared}
        limits = {name: limit for name, limit in own.items() if limit is not None}
        return cls(training, limits=limits) if limits else None

    @override
    def around_update(self, parts: Parts) -> Parts:
        training = self._training

        def update(step: int, parameter_set: ParameterSet) -> bool:
            if (limit := self._limits.get(parameter_set.name)) is None:
                return parts.update(step, parameter_set)
            training.scaler.unscale_(parameter_set.optimizer)
            norm = parameter_set.norm()
            for parameters in parameter_set.by_kind:
                clip_grads_with_norm_(parameters, limit, norm)
            self._norms.setdefault(step + 1, {})[parameter_set.name] = norm
            return parts.update(step, parameter_set)

        return parts._replace(update=update)

    @override
    def take_columns(self) -> Mapping[str, Mapping[int, Any]]:
        columns: dict[str, dict[int, Any]] = {}
        has_total = self._training.experiment.train.clip_grad_norm is not None
        for step, norms in self._norms.items():
            for name, norm in norms.items():
                columns.setdefault(f"{GRADIENT_NORM}_{name}" if name else GRADIENT_NORM, {})[step] = norm
            if has_total and "" not in norms:
                total = torch.stack([norm.square() for norm in norms.values()]).sum().sqrt()
                columns.setdefault(GRADIENT_NORM, {})[step] = total
        self._norms = {}
        return columns
