"""The section ``benchmark`` of an experiment: what is measured, against which baseline, and for how long."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from pipeline.experiment.parallel import StrategyName
from pipeline.experiment.values import NotNegative, Positive, PositiveFloat, Section


class Configuration(Section):
    """Strategy, workers and options to use instead of the values in ``parallel``."""

    strategy: StrategyName
    """Parallel strategy of this configuration."""
    workers: Positive | None = None
    """Workers of this configuration; default: parallel.workers if the strategy runs several processes, else 1."""
    options: Mapping[str, Any] = {}
    """Options of the strategy."""


class Benchmark(Section):
    """Measurement of the speedup over a baseline, and of throughput."""

    baseline: Configuration = Configuration(strategy="single")
    """Configuration that the speedup is measured against. Default: one worker without a strategy."""
    rounds: Annotated[int, Field(ge=5)] = 16
    """Maximum number of rounds of a speedup measurement. A round times the baseline and the training run once each."""
    time_budget_s: PositiveFloat = 30.0
    """Time budget for these rounds, in seconds. At least 5 rounds run, or at least 2 if 5 rounds would take more than
    1.5 times the budget. All measurements after the training take about twice the budget at most."""
    confidence_level: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Confidence level of the confidence interval of a speedup."""
    warmup_steps: NotNegative = 3
    """Steps before the first timed window."""
    steps: Positive = 5
    """Steps in one timed window."""
    windows: Positive = 3
    """Number of timed windows; the throughput is the median over the windows."""
    price_per_device_hour: PositiveFloat | None = None
    """Price of one GPU hour, or of one core hour on the CPU, in any currency. The report then includes the cost of the
    training with each strategy."""

    @property
    def limit_s(self) -> float:
        """Time limit in seconds for all measurements after a training."""
        return 2 * self.time_budget_s

    @property
    def total_steps(self) -> int:
        """Steps of one measurement, warm-up included."""
        return self.warmup_steps + self.steps * self.windows
