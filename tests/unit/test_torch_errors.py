"""Errors that share their type, or their words, with those of collectives and of memory that runs out."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import toys
from torch import Tensor, nn

from pipeline import worker as main
from pipeline.protocol.events import Failed
from pipeline.protocol.rank import Rank
from pipeline.train.errors import is_out_of_memory, origin

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
        (RuntimeError(f"Got the following error when running the callback: RuntimeError: {CLOSED}"), "lost_peer"),
        (dist.DistBackendError("NCCL error: remote process exited"), "lost_peer"),
        (dist.DistNetworkError("Failed to recv, got 0 bytes"), "lost_peer"),
        (RuntimeError(LATE), "peer_timeout"),
        (RuntimeError("Application timeout caused pair closure"), "peer_timeout"),
        (dist.DistBackendError("Watchdog caught collective operation timeout: WorkNCCL"), "peer_timeout"),
        (RuntimeError("[enforce fail at /gloo/gloo/transport/tcp/pair.cc:456] op.nbytes. 300 vs 4"), "rank"),
        (RuntimeError("Connection reset by peer"), "rank"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_torch_raises_is_told_apart_by_type_and_place(error: Exception, expected: str) -> None:
    assert origin(by_torch(error)) == expected


@pytest.mark.parametrize(
    "error",
    [
        BrokenPipeError(32, "Broken pipe"),
        RuntimeError(CLOSED),
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


def test_an_error_of_user_code_within_a_backward_pass_or_of_an_operation_is_its_own() -> None:
    inputs = torch.ones(2, requires_grad=True)
    assert origin(caught(lambda: Picky.apply(inputs).sum().backward())) == "rank"
    (inputs * 2).sum().backward()
    inputs.register_hook(lambda gradient: fail(RuntimeError(LATE)))
    assert origin(caught(lambda: (inputs * 2).sum().backward())) == "rank"
    assert origin(caught(lambda: torch.ones(2, 3) @ torch.ones(2, 3))) == "rank"
    timeout = timedelta(milliseconds=100)
    error = caught(lambda: dist.TCPStore("127.0.0.1", 1, is_master=False, timeout=timeout))
    assert (isinstance(error, dist.DistNetworkError), origin(error)) == (True, "rank"), "a store of user code"


def test_what_is_raised_from_a_lost_peer_is_one() -> None:
    def constructor(cause: BaseException) -> None:
        raise LookupError("no model") from cause

    error = KeyError("mine")
    error.__cause__ = error
    assert origin(caught(lambda: constructor(by_torch(RuntimeError(CLOSED))))) == "lost_peer"
    assert origin(caught(lambda: fail(error))) == "rank"


def test_a_connection_that_a_dataset_loses_is_the_runs_own_error() -> None:
    outbox = toys.Kept()
    with pytest.raises(main.WorkerFailed):
        main.run(toys.trial(data={"_target_": "toys.far_away"}), rank=Rank(), outbox=outbox)
    (found,) = (event for event in outbox.events if isinstance(event, Failed))
    assert found.origin == "rank"
    assert found.error.endswith("ConnectionResetError: [Errno 104] Connection reset by peer")
    assert "toys.py" in found.traceback


def test_memory_that_user_code_speaks_of_is_not_ours() -> None:
    for words in ("the GPU server is out of memory", "can't allocate memory", "CUDNN_STATUS_ALLOC_FAILED"):
        assert not is_out_of_memory(caught(lambda words=words: fail(RuntimeError(words))))
        assert is_out_of_memory(by_torch(RuntimeError(words)))
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")):
        assert is_out_of_memory(error)
    assert is_out_of_memory(caught(lambda: nn.Linear(10**7, 10**7)))
    assert not is_out_of_memory(caught(lambda: torch.ones(2, 3) @ torch.ones(2, 3)))
    assert not is_out_of_memory(ValueError("out of memory"))
