"""Functions that several ranks run: real processes, which meet over gloo."""

import gc
import multiprocessing
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline.protocol.trial import Rank

# What takes seconds to import, once for all ranks of all tests; toys have a metric.
multiprocessing.set_forkserver_preload(
    ["pipeline.worker", "pipeline.strategies.fsdp", "torch._dynamo", "torchmetrics", "pytest", "hypothesis"]
)


def _use_one_thread() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # the fork server's imports: each collection would look through them and copy their pages


def _call_in_group(
    rank: int,
    world_size: int,
    folder: Path,
    timeout_s: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> Any:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    dist.barrier()  # a rank whose function needs no other would close connections that another is still making
    where = Rank(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
    found = function(where, *arguments)
    dist.destroy_process_group()
    return found


class RankFailed(Exception):
    """A rank raised an error or died; the message has its traceback."""


class Ranks:
    """Processes that serve one call after the other, each in a process group of its own.

    A function must leave its process as it was. After a call that failed, the next one starts other processes.
    """

    def __init__(self, world_size: int, *, timeout_s: float = 60) -> None:
        self.world_size, self.timeout_s = world_size, timeout_s
        self._ready: dict[Connection, BaseProcess] = {}

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call ``function(rank, *arguments)`` on each rank; return what each of them returns.

        Raises:
            RankFailed: a rank failed; the others are ended, as they may wait for it.
        """
        if not self._ready:
            self._start()
        try:
            with tempfile.TemporaryDirectory() as folder:
                work = pickle.dumps((Path(folder), self.timeout_s, function, arguments))
                for connection in self._ready:
                    connection.send_bytes(work)
                return self._collect_answers()
        except BaseException:  # a timeout of pytest, too: the next call would get what is still to come of this one
            self.close()
            raise

    def close(self) -> None:
        """End the processes; without effect after the first time."""
        for connection, process in self._ready.items():
            connection.close()
            process.kill()
            process.join()
        self._ready = {}

    def _start(self) -> None:
        sys.audit("tests.ranks")
        context = multiprocessing.get_context("forkserver")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.world_size), daemon=True)
            process.start()
            theirs.close()
            self._ready[ours] = process

    def _collect_answers(self) -> list[Any]:
        found: dict[Any, Any] = {}
        while len(found) < self.world_size:
            for connection in wait([one for one in self._ready if one not in found]):
                try:
                    succeeded, found[connection] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    succeeded, found[connection] = False, "a rank died"
                if not succeeded:
                    raise RankFailed(found[connection])
        return [found[connection] for connection in self._ready]


def _serve(connection: Connection, rank: int, world_size: int) -> None:
    """Call what arrives until the other end closes; end after an error, which leaves a process group behind."""
    _use_one_thread()
    with suppress(EOFError):
        while True:
            folder, timeout_s, function, arguments = pickle.loads(connection.recv_bytes())
            try:
                found = _call_in_group(rank, world_size, folder, timeout_s, function, arguments)
            except Exception:  # noqa: BLE001 (the other process raises it)
                connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
                return
            connection.send_bytes(pickle.dumps((True, found)))
