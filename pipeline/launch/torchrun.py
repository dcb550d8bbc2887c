"""Launcher for worker processes on this machine, with the environment variables of ``torchrun``.

Workers are forked from a process that has imported torch, so that the first step comes sooner than under torch's
elastic agent. In a run that ``torchrun`` or ``srun`` started, this process starts rank 0's worker only. The
processes of other ranks start theirs, see `pipeline.drive.outer_run`.
"""

import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Self

from pipeline.errors import terminate
from pipeline.experiment.schema import Parallel
from pipeline.launch import _head_start, base
from pipeline.launch._forks import Forks, Process
from pipeline.launch._outer_group import joined
from pipeline.launch._outer_ranks import resources_of_all
from pipeline.launch._outer_workers import OtherWorker, OuterWorkers
from pipeline.plan import resources
from pipeline.plan.outer_launcher import outer_launcher
from pipeline.plan.resources import Resources
from pipeline.protocol.channel.wire import Address
from pipeline.protocol.events import Warned
from pipeline.protocol.trial import Trial
from pipeline.protocol.trial_outcome import Outcome
from pipeline.system.signals import handled
from pipeline.worker import rendezvous

_LOOPBACK = "127.0.0.1"
_POLL_S = 0.05
_INTERRUPTED_S = 5.0
_END_S = 30.0
"""Seconds that workers get to end after SIGINT, and after SIGTERM, before they are killed."""
_LOSS_S = 3.0
"""The same after a failure, when there is nothing to save: a rank that waits for its GPU never reacts to SIGTERM."""


class Launcher(base.Launcher):
    """Runs `pipeline.worker.main` in one process per rank."""

    def __init__(self, session: base.Session) -> None:
        super().__init__(session)
        self._forks: Forks | None = None
        self._outer = outer_launcher()
        self.replaces_workers = self._outer is None

    def __enter__(self) -> Self:
        self._forks = self.held.enter_context(_head_start.forks())
        return self

    @staticmethod
    def resources(parallel: Parallel) -> Resources:
        """Return the resources of this machine, or of all ranks of an outer launcher."""
        outer = outer_launcher()
        return resources.detect() if outer is None else resources_of_all(outer, parallel)

    def capacity(self, trial: Trial) -> int:
        """Return how many workers this machine has cores and GPUs for; under an outer launcher, how many there are."""
        if self._outer is not None:
            return self._outer.world_size
        there = resources.detect()
        fit = there.cpus // trial.cpus_per_worker
        return min(fit, len(there.gpus) // trial.devices_per_worker) if trial.device == "cuda" else fit

    def launch(self, trial: Trial) -> Outcome:
        """Run the trial; see `pipeline.launch.base.Launcher`."""
        attempt, outer = self.attempt(trial), None
        if self._outer is not None and trial.workers > 1:
            group = joined(self._outer, timeout_s=trial.experiment.parallel.start_timeout_s)
            outer = OuterWorkers(trial, group=group, attempt=attempt)
        assert self._forks is not None
        folder = self.session.folder / "trials"
        folder.mkdir(exist_ok=True)
        assignment, channel = folder / f"{trial.name}.json", folder / f"{trial.name}.channel"
        assignment.write_text(trial.model_dump_json(indent=1))
        try:
            with attempt.listening(outer.host if outer else _LOOPBACK) as address:
                _write_secret(channel, address)
                arguments = [str(assignment), "--channel", str(channel)]
                if outer is not None:
                    outer.start_others(address)
                losses = self._run(trial, arguments, self._forks, lost=attempt.lost, outer=outer)
        finally:
            channel.unlink(missing_ok=True)
        # The last connections are read at the end of the block.
        losses = losses or dict.fromkeys(attempt.lost, _how(0))
        return outer.outcome(losses) if outer is not None else attempt.outcome(losses)

    def _run(
        self,
        trial: Trial,
        arguments: Sequence[str],
        forks: Forks,
        *,
        lost: Collection[int] = (),
        outer: OuterWorkers | None = None,
    ) -> dict[int, str]:
        """Run all ranks to their end; if some fail, end the others, and return how the failed ones ended, by rank.

        Args:
            trial: the trial.
            arguments: arguments of each rank's process.
            forks: starts the processes.
            lost: ranks that have disconnected before their end; it grows meanwhile.
            outer: workers on the ranks of an outer launcher, if there is one: only rank 0's is started here.
        """
        if outer is not None:
            variables = [outer.variables]
        else:
            timeout = timedelta(seconds=trial.experiment.parallel.start_timeout_s)
            store = rendezvous.opened(_LOOPBACK, 0, timeout=timeout)  # until the end of this function
            variables = [self._variables(trial, rank=rank, port=store.port) for rank in range(trial.workers)]
        ranks: list[Process] = []
        with _quitting_ends():
            try:
                for rank, own in enumerate(variables):
                    streams = () if self.session.verbose else ("stdout", "stderr")  # files are named as under Ray
                    logs = [self.session.log_folder(trial) / f"rank{rank}-{stream}.log" for stream in streams]
                    ranks.append(forks.start(arguments, environment=os.environ | own, logs=logs))
                if warning := forks.take_warning():
                    self.session.receive(Warned(trial=trial.name, message=warning))
                others = outer.others if outer else []
                losses = _losses([*ranks, *others], lost=lost, meanwhile=lambda: self._pass_on_stop(outer))
            except BaseException as error:
                _end(ranks, interrupted=isinstance(error, KeyboardInterrupt))
                raise
        if losses:
            _end(ranks, patience_s=_LOSS_S)
        if losses and outer is not None:
            return losses | outer.find_lost(losses)
        return losses

    def _pass_on_stop(self, outer: OuterWorkers | None) -> None:
        """Treat a stop that another rank of an outer launcher asks for as SIGTERM to this process."""
        if outer is not None and not self.stop.asked and outer.is_stop_asked():
            signal.raise_signal(signal.SIGTERM)

    def _variables(self, trial: Trial, *, rank: int, port: int) -> dict[str, str]:
        """Return the environment variables that ``torchrun`` sets for a worker."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(trial.workers),
            "LOCAL_WORLD_SIZE": str(trial.workers),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": _LOOPBACK,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": f"{self.session.folder.name}-{trial.name}",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # opened by this process
            "OMP_NUM_THREADS": str(trial.cpus_per_worker),
        }


def _losses(
    ranks: Sequence[Process | OtherWorker], *, lost: Collection[int], meanwhile: Callable[[], None] = lambda: None
) -> dict[int, str]:
    """Wait until all ranks have ended, or one has failed; return how the failed ones ended, by rank.

    A lost rank has failed whatever its exit code is: its code, or a library, may call ``os._exit(0)``.
    """
    while True:
        codes = dict(enumerate(rank.poll() for rank in ranks))
        failed = {rank: _how(code) for rank, code in codes.items() if code or (code == 0 and rank in lost)}
        if failed or None not in codes.values():
            return failed
        meanwhile()
        time.sleep(_POLL_S)


def _end(ranks: Sequence[Process], *, interrupted: bool = False, patience_s: float = _END_S) -> None:
    """End all ranks with the processes that they have started; SIGINT comes first if the run was interrupted."""
    attempts = {signal.SIGINT: _INTERRUPTED_S} if interrupted else {}
    for number, seconds in (attempts | {signal.SIGTERM: patience_s, signal.SIGKILL: _END_S}).items():
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, number)  # includes loader processes of a rank that has ended
        deadline = time.monotonic() + seconds
        while None in [rank.poll() for rank in ranks] and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def _quitting_ends() -> AbstractContextManager[None]:
    """Raise Terminated at SIGQUIT, unless it is ignored. It doesn't reach the workers, which have separate sessions."""
    is_default = signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL
    return handled(terminate, *([signal.SIGQUIT] if is_default else []))


def _write_secret(path: "os.PathLike[str]", address: Address) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(address.model_dump_json())


def _how(exit_code: int) -> str:
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    hint = "" if exit_code else " before the end of the training. Look for os._exit in your code and its libraries"
    return f"ended with exit code {exit_code}{hint}"
