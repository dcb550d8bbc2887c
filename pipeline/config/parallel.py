"""The section ``parallel``: how the work is spread over devices, and who starts the workers."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

from pipeline.config.values import LauncherName, NotNegative, Positive, PositiveFloat, Section, StrategyName, Writable


def _least_and_most(value: object) -> object:
    """``4`` as ``[4, 4]``.

    Raises:
        ValueError: neither a number nor two of them, the smaller one first.
    """
    both = [value, value] if isinstance(value, int) else value
    if not isinstance(both, list | tuple) or len(both) != 2 or any(type(n) is not int or n < 1 for n in both):
        where = f", in place of {json.dumps(value)}" if isinstance(value, list | tuple) else ""
        raise ValueError(f"write a whole number greater than 0, or two of them, [least, most]{where}")
    if both[0] > both[1]:
        raise ValueError(f"write the least first: [{both[1]}, {both[0]}]")
    return both


_COUNT = {"type": "integer", "exclusiveMinimum": 0}
WorkerCounts = Annotated[
    tuple[int, int],
    BeforeValidator(_least_and_most),
    PlainSerializer(lambda counts: counts[1] if counts[0] == counts[1] else list(counts), when_used="always"),
    WithJsonSchema({"anyOf": [_COUNT, {"type": "array", "items": _COUNT, "minItems": 2, "maxItems": 2}]}),
]
"""The least and the most; one number stands for both."""


class Parallel(Section):
    """How the work is spread over devices, and who starts the workers."""

    strategy: StrategyName = "single"
    """single, dp, ddp, fsdp or another file of pipeline/strategies."""
    launcher: LauncherName = "inprocess"
    """inprocess, torchrun, ray or another file of pipeline/launchers."""
    worker_counts: Annotated[WorkerCounts, Field(alias="workers", json_schema_extra={"default": 1})] = (1, 1)
    """Processes, one device each. [1, 4]: as many as there is room for, 1 at least and 4 at most; training goes on with
    fewer when a node is lost, and with more when there is room."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: GPUs when there are any, else CPU; the plan says which."""
    cpus_per_worker: Positive | None = None
    """Cores and threads of each worker; default: this machine's cores divided by the workers."""
    gpus_per_worker: Positive | None = None
    """GPUs of each worker of a strategy that uses several, such as dp; default: all of a node. Others use one."""
    resources_per_worker: Mapping[str, PositiveFloat] = {}
    """Custom Ray resources that each worker occupies, by name."""
    placement: Literal["pack", "spread", "strict_spread"] = "pack"
    """How Ray places workers: on as few nodes as possible, over as many as possible, or each on a node of its own."""
    interface: Writable | None = None
    """Network interface for gloo and NCCL on all nodes; default: the one with the address by which Ray knows a node."""
    address: Writable | None = None
    """Address of a running Ray cluster; a local one is started otherwise. RAY_ADDRESS is read too."""
    ship_code: bool = True
    """Send the project's files that git tracks to a cluster; false where its nodes have them at the same path."""
    start_timeout_s: PositiveFloat = 120.0
    """Longest wait until all workers have been placed and have met."""
    timeout_s: PositiveFloat = 300.0
    """Longest wait in a collective operation before a missing rank is reported."""
    max_failures: NotNegative = 0
    """How often training goes on from the newest checkpoint after workers were lost, e.g. killed."""
    grace_s: PositiveFloat = 25.0
    """Longest wait for a checkpoint after SIGTERM; schedulers kill a job some 30 s after it."""
    options: Mapping[str, Any] = {}
    """The strategy's own options; ddp: sync_batch_norm, bucket_cap_mb, gradient_as_bucket_view, static_graph,
    find_unused_parameters, communication_hook (none, fp16, bf16, powersgd), powersgd_rank, powersgd_start_step,
    local_sgd_period, local_sgd_start_step;
    fsdp: groups, reshard_after_forward, cpu_offload, reduce_each_micro_batch, zero_unused_gradients."""

    @property
    def workers(self) -> int:
        """Processes, one device each; the most, if their number may change."""
        return self.worker_counts[1]

    @property
    def least_workers(self) -> int:
        """Processes without which training doesn't go on."""
        return self.worker_counts[0]

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers may change in the middle of a training."""
        return self.least_workers < self.workers
