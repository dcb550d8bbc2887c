"""Metrics of training steps (``metrics`` with ``on: [train, validation]``)."""

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from pipeline.errors import ExperimentError
from pipeline.protocol.trial import Training
from pipeline.tasks import StepOutput
from pipeline.training.batches.order import MicroBatch
from pipeline.training.context import TrainContext
from pipeline.training.evaluation.metric_states import SharedMetrics
from pipeline.training.feature import Feature, Saved
from pipeline.training.model import metrics
from pipeline.training.ranks.collectives import from_first
from pipeline.training.step.plain import Parts, Stepped

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

Value = TypeVar("Value")


class TrainMetrics(Feature):
    """Metrics of the outputs of all training steps since the last report, over all ranks.

    A checkpoint follows a report, so it has the states that metrics keep over reports, and no others.
    """

    name: ClassVar[str] = "train_metrics"
    is_measured: ClassVar[bool] = False

    def __init__(self, training: TrainContext, collection: "MetricCollection") -> None:
        self._training, self.metrics = training, collection
        self._key = f"metrics.{next(iter(collection))}" if len(collection) == 1 else "metrics"
        self._is_training, self._last = False, 0
        self._shared = self._start()

    @override
    @classmethod
    def of(cls, training: TrainContext) -> Self | None:
        declared = {name: metric for name, metric in training.experiment.metrics.items() if metric.is_trained}
        if not declared or not isinstance(training.trial, Training):
            return None
        from torchmetrics import MetricCollection  # slow to import

        built = dict(metrics.build(training.create, declared))
        return cls(training, MetricCollection(built, compute_groups=False).to(training.device))

    @override
    def around_gradients(self, parts: Parts) -> Parts:
        def weigh(micro_batch: MicroBatch, output: StepOutput) -> tuple[Tensor, Any]:
            if self._is_training and micro_batch.weight:  # else measured, or a sample that fills up a rank's batches
                given = tree_map_only(Tensor, Tensor.detach, (output.outputs, output.targets))
                self._explained(lambda: self._shared.update(*given))
            return parts.weigh(micro_batch, output)

        return parts._replace(weigh=weigh)

    @override
    def around_update(self, parts: Parts) -> Parts:
        def step(final: Parts, training: TrainContext, number: int, micro_batches: Any) -> Stepped:
            self._is_training, self._last = True, number + 1
            try:
                return parts.step(final, training, number, micro_batches)
            finally:
                self._is_training = False

        return parts._replace(step=step)

    @override
    def take_columns(self) -> Mapping[str, Mapping[int, float]]:
        self._shared.merge()
        with warnings.catch_warnings(action="ignore"):  # of classes that these steps lack
            values = from_first(lambda: self._explained(self._read), rank=self._training.rank)
        self.metrics.reset()
        self._shared = self._start()
        return {name: {self._last: value} for name, value in values.items()}

    @override
    def state_dict(self) -> Mapping[str, Any]:
        return dict(self.metrics.state_dict())

    @override
    def load_state_dict(self, state: Mapping[str, Any] | None, *, saved: Saved) -> None:
        self.metrics.load_state_dict(dict(state or {}), strict=False)

    def _start(self) -> SharedMetrics:
        how = self._training.experiment.train.compile
        copies = how is not None and how.has_cuda_graphs
        return SharedMetrics(self.metrics, rank=self._training.rank, copies=copies)

    def _read(self) -> dict[str, float]:
        return metrics.read(self.metrics.compute(), dict(self.metrics.items())).values

    @torch.no_grad()
    def _explained(self, call: Callable[[], Value]) -> Value:
        try:
            return call()
        except Exception as error:
            said = " ".join(str(error).split())[:300]
            message = f"on: [train, validation] raised {type(error).__name__} for training batches: {said}"
            raise ExperimentError.of(self._key, message) from error
