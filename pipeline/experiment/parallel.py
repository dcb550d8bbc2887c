"""The section ``parallel`` of an experiment: strategy, launcher, number of workers and their resources."""

import json
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema

from pipeline import registry
from pipeline.experiment.values import NotNegative, Positive, PositiveFloat, Section, Writable


def _known(kind: registry.Kind) -> AfterValidator:
    def check(name: str) -> str:
        if name not in (known := registry.names(kind)):
            raise ValueError(f"unknown; choose one of {', '.join(known)}")
        return name

    return AfterValidator(check)


StrategyName = Annotated[str, _known("strategies")]
LauncherName = Annotated[str, _known("launchers")]


def _least_and_most(value: object) -> object:
    """Expand ``4`` to ``[4, 4]``.

    Raises:
        ValueError: neither a positive integer nor two of them in ascending order.
    """
    both = [value, value] if isinstance(value, int) else value
    if not isinstance(both, list | tuple) or len(both) != 2 or any(type(n) is not int or n < 1 for n in both):
        where = f", instead of {json.dumps(value)}" if isinstance(value, list | tuple) else ""
        raise ValueError(f"write an integer greater than 0, or [minimum, maximum]{where}")
    if both[0] > both[1]:
        raise ValueError(f"write the smaller number first: [{both[1]}, {both[0]}]")
    return both


_COUNT = {"type": "integer", "exclusiveMinimum": 0}
WorkerCounts = Annotated[
    tuple[int, int],
    BeforeValidator(_least_and_most),
    PlainSerializer(lambda counts: counts[1] if counts[0] == counts[1] else list(counts), when_used="always"),
    WithJsonSchema({"anyOf": [_COUNT, {"type": "array", "items": _COUNT, "minItems": 2, "maxItems": 2}]}),
]
"""The minimum and the maximum number of workers; a single integer stands for both."""


class Parallel(Section):
    """Parallel strategy, launcher, workers and their resources."""

    strategy: StrategyName = "single"
    """Parallel strategy: single, dp, ddp, fsdp, or the name of another package's strategy."""
    launcher: LauncherName = "inprocess"
    """Program that starts the workers: inprocess, torchrun, ray, or the name of another package's launcher."""
    worker_counts: Annotated[WorkerCounts, Field(alias="workers", json_schema_extra={"default": 1})] = (1, 1)
    """Worker processes, one device each. [1, 4] is elastic: 1 to 4 workers, depending on the free resources. Training
    continues with fewer workers if a node is lost."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on. auto uses GPUs if there are any, otherwise the CPU. The plan shows the device."""
    cpus_per_worker: Positive | None = None
    """Cores and threads per worker. Default: the cores of this machine divided by the number of workers."""
    gpus_per_worker: Positive | None = None
    """GPUs per worker, for a strategy that uses several GPUs in one process, such as dp. Default: all GPUs of a node.
    With other strategies, a worker uses one GPU."""
    placement: Literal["pack", "spread", "strict_spread"] = "pack"
    """Placement of the workers by Ray. pack: on few nodes. spread: on many nodes. strict_spread: each on a separate
    node."""
    address: Writable | None = None
    """Address of a running Ray cluster, e.g. HOST:6379. Default: RAY_ADDRESS; without it, a local Ray is started."""
    start_timeout_s: PositiveFloat = 600.0
    """Maximum time to wait for free resources on a busy cluster, and then until all workers have started and joined the
    process group. Imports on many nodes take minutes."""
    timeout_s: PositiveFloat = 300.0
    """Timeout of collective operations: after this time, a missing rank is reported."""
    max_failures: NotNegative = 0
    """Maximum number of restarts from the latest checkpoint after workers were lost, e.g. killed."""
    grace_s: PositiveFloat = 25.0
    """Maximum time to wait for a checkpoint after SIGTERM. Batch systems kill a job about 30 s after SIGTERM."""
    options: Mapping[str, Any] = {}
    """Options of the strategy; ddp: sync_batch_norm, bucket_cap_mb, gradient_as_bucket_view, static_graph,
    find_unused_parameters, communication_hook (none, fp16, bf16);
    fsdp: groups, reshard_after_forward, cpu_offload, reduce_each_micro_batch, zero_unused_gradients."""

    @property
    def workers(self) -> int:
        """Worker processes, one device each; the maximum if training is elastic."""
        return self.worker_counts[1]

    @property
    def least_workers(self) -> int:
        """Least number of workers that training continues with."""
        return self.worker_counts[0]

    @property
    def cluster(self) -> str | None:
        """Address of the Ray cluster that ``address`` or RAY_ADDRESS names; None: a local Ray."""
        return self.address or os.environ.get("RAY_ADDRESS") or None

    @property
    def is_elastic(self) -> bool:
        """True if the number of workers may change during training."""
        return self.least_workers < self.workers
