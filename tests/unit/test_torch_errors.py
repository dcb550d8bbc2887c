"""Errors that share their type, or their words, with those of collectives and of memory that runs out."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import toys
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pipeline.errors import ExperimentError, NoMemoryError
from pipeline.protocol.events import Failed
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial_outcome import Outcome
from pipeline.training.ranks.torch_errors import is_out_of_memory, origin
from pipeline.training.step.explained_errors import explained
from pipeline.worker import main

CLOSED = "[/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:51423"
LATE = "[/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete"


def caught(act: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as info:  # noqa: PT011 (any)
        act()
    return info.value


def fail(error: BaseException) -> None:
    raise error


def by_torch(error: BaseException) -> BaseException:
    """The error, raised as by torch.distributed."""
    file = Path(dist.__file__ or "").parent / "distributed_c10d.py"
    namespace: dict[str, Any] = {}
    exec(compile("def all_reduce(error): raise error", str(file), "exec"), namespace)
    return caught(lambda: namespace["all_reduce"](error))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(CLOSED), "lost_peer"),
        (RuntimeError(f"Gloo connectFullMesh failed with {CLOSED}"), "lost_peer"),
        (RuntimeError(f"Got the following error when running the callback: RuntimeError: {CLOSED}"), "lost_peer"),
        (dist.DistBackendError("NCCL error: remote process exited"), "lost_peer"),
        (dist.DistNetworkError("Failed to recv, got 0 bytes"), "lost_peer"),
        (RuntimeError(LATE), "peer_timeout"),
        (RuntimeError("Application timeout caused pair closure"), "peer_timeout"),
        (dist.DistBackendError("Watchdog caught collective operation timeout: WorkNCCL"), "peer_timeout"),
        (RuntimeError("[enforce fail at /gloo/gloo/transport/tcp/pair.cc:456] op.nbytes. 300 vs 4"), "rank"),
        (RuntimeError("Invalid scalar type"), "rank"),
        (RuntimeError("Connection reset by peer"), "rank"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_torch_raises_is_told_apart_by_type_and_place(error: Exception, expected: str) -> None:
    assert origin(by_torch(error)) == expected


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(104, "Connection reset by peer"),
        BrokenPipeError(32, "Broken pipe"),
        RuntimeError(CLOSED),
        RuntimeError(LATE),
        dist.DistBackendError("mine"),
        dist.DistNetworkError("mine"),
    ],
    ids=lambda error: str(error)[:40],
)
def test_what_user_code_raises_is_its_own_whatever_it_says(error: Exception) -> None:
    assert origin(caught(lambda: fail(error))) == "rank"


class Picky(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        fail(RuntimeError(CLOSED))


def test_an_error_of_user_code_within_a_backward_pass_is_its_own() -> None:
    inputs = torch.ones(2, requires_grad=True)
    assert origin(caught(lambda: Picky.apply(inputs).sum().backward())) == "rank"
    (inputs * 2).sum().backward()
    inputs.register_hook(lambda gradient: fail(RuntimeError(LATE)))
    assert origin(caught(lambda: (inputs * 2).sum().backward())) == "rank"


def test_an_error_of_an_operation_is_no_lost_peer() -> None:
    assert origin(caught(lambda: torch.ones(2, 3) @ torch.ones(2, 3))) == "rank"


def test_a_store_of_user_code_is_no_peer() -> None:
    timeout = timedelta(milliseconds=100)
    error = caught(lambda: dist.TCPStore("127.0.0.1", 1, is_master=False, timeout=timeout))
    assert (isinstance(error, dist.DistNetworkError), origin(error)) == (True, "rank")


def test_what_is_raised_from_a_lost_peer_is_one() -> None:
    def constructor() -> None:
        try:
            raise by_torch(RuntimeError(CLOSED))
        except RuntimeError as error:
            raise LookupError("no model") from error

    def again() -> None:
        try:
            fail(KeyError("mine"))
        except KeyError as error:
            raise error from error

    assert origin(caught(constructor)) == "lost_peer"
    assert origin(caught(again)) == "rank"


def test_a_connection_that_a_dataset_loses_is_the_runs_own_error() -> None:
    outbox = toys.Kept()
    trial = toys.trial(data={"_target_": "toys.far_away"})
    with pytest.raises(main.WorkerFailed):
        main.run(trial, rank=Rank(), outbox=outbox)
    failed = outbox.events[-1]
    assert isinstance(failed, Failed)
    assert failed.origin == "rank"
    assert failed.error.endswith("ConnectionResetError: [Errno 104] Connection reset by peer")
    assert "toys.py" in failed.traceback


def test_memory_that_user_code_speaks_of_is_not_ours() -> None:
    for words in ("the GPU server is out of memory", "can't allocate memory", "CUDNN_STATUS_ALLOC_FAILED"):
        assert not is_out_of_memory(caught(lambda words=words: fail(RuntimeError(words))))
        assert is_out_of_memory(by_torch(RuntimeError(words)))


def test_a_layer_that_is_no_batch_norm_keeps_its_own_words() -> None:
    """GroupNorm refuses a single value in the words of BatchNorm."""
    model = {"_target_": "torch.nn.GroupNorm", "num_groups": 3, "num_channels": 3}
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        toys.trained(model=model, train={"global_batch_size": 1})


def test_a_model_that_is_too_large_for_memory_says_so() -> None:
    assert is_out_of_memory(caught(lambda: nn.Linear(10**7, 10**7)))


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")]
)
def test_some_types_are_all_about_memory(error: Exception) -> None:
    assert is_out_of_memory(error)


def test_other_errors_are_not_about_memory() -> None:
    assert not is_out_of_memory(caught(lambda: torch.ones(2, 3) @ torch.ones(2, 3)))
    assert not is_out_of_memory(ValueError("out of memory"))


class Greedy(nn.Linear):
    """A model that needs more memory than any machine has."""

    def forward(self, inputs: Tensor) -> Tensor:
        torch.empty(2**60, dtype=torch.uint8)
        return super().forward(inputs)


def test_a_rank_reports_that_it_ran_out_of_memory() -> None:
    outbox = toys.Kept()
    trial = toys.trial(model={"_target_": "test_torch_errors.Greedy", "in_features": 3, "out_features": 1})
    with pytest.raises(main.WorkerFailed):
        main.run(
            trial.model_copy(update={"allowed": (*trial.allowed, "test_torch_errors")}), rank=Rank(), outbox=outbox
        )
    failed = outbox.events[-1]
    assert isinstance(failed, Failed)
    assert failed.is_out_of_memory
    assert isinstance(Outcome(failures=(failed,)).error, NoMemoryError)


class Reentrant(nn.Module):
    """A model that recomputes a layer in two backward passes within one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        once = checkpoint(self.body, self.first(inputs), use_reentrant=True)
        return checkpoint(self.body, once, use_reentrant=True)


def test_a_layer_that_ddp_gets_two_gradients_of_is_named() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(Reentrant())
        loss = model(torch.ones(2, 3)).sum()
        context: Any = SimpleNamespace(built=SimpleNamespace(trainable=dict(model.module.named_parameters())))
        with pytest.raises(ExperimentError) as info, explained(context):
            loss.backward()
    finally:
        dist.destroy_process_group()
    assert str(info.value).startswith(
        "parallel.options.static_graph: is false, but one backward pass computes the gradients of body.0 twice"
    )
