"""Launcher for worker processes on this machine: one for each rank, which meet in a file.

The processes start as soon as the experiment file has been read, and import torch while this process checks the
experiment; a process waits for its job, and ends if there is none. In a run that ``torchrun`` or ``srun`` started each
of their processes is a rank, see `pipeline.launch.outer`.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeline.errors import terminate
from pipeline.experiment import components
from pipeline.experiment.schema import Experiment, Parallel
from pipeline.experiment.targets import BUILT_IN
from pipeline.launch import base, outer
from pipeline.plan import resources
from pipeline.plan.outer_launcher import outer_launcher
from pipeline.plan.resources import Resources
from pipeline.protocol.events import Outcome
from pipeline.protocol.trial import Job, Rank, Trial
from pipeline.system import environment, handle_signals

Process = subprocess.Popen[bytes]
_CODE = "import gc, sys; gc.disable(); from pipeline.worker import work; work(sys.argv[1:])"
"""Collections of garbage would take a quarter of the time of the imports."""
_IMPORTED = {"torch", "pipeline", "ray"}
_POLL_S = 0.05
_INTERRUPTED_S = 5.0
_END_S = 30.0  # Seconds that workers get to end after SIGINT, and after SIGTERM, before they are killed
_LOSS_S = 3.0
"""The same after a failure, when there is nothing to save: a rank that waits for its GPU never reacts to SIGTERM."""
_waiting: list[Process] = []  # Processes that have no job yet


class Launcher(base.Launcher):
    """Runs `pipeline.worker.work` in one process per rank."""

    def __init__(self, session: base.Session) -> None:
        super().__init__(session)
        self._outer = outer_launcher()
        self.replaces_workers = self._outer is None

    @classmethod
    @contextmanager
    def preparing(cls, experiment: Experiment, *, verbose: bool = False) -> Iterator[None]:
        """Start the processes of all ranks; end those that got no job."""
        # Otherwise each process, and each run, would iterate over a set of texts in another order.
        with environment(PYTHONHASHSEED=os.environ.get("PYTHONHASHSEED", str(experiment.seed % 2**32))):
            try:
                if outer_launcher() is None:
                    count = min(experiment.parallel.workers, max(1, len(resources.usable_cores())))
                    libraries = find_libraries(experiment)
                    _waiting.extend(_start(libraries, None, quiet=not verbose) for _ in range(count))
                yield
            finally:
                _end(_waiting, patience_s=0.0)
                _waiting.clear()

    @staticmethod
    def resources(parallel: Parallel) -> Resources:
        """Return the resources of this machine, or of all ranks of an outer launcher."""
        there = outer_launcher()
        return resources.detect() if there is None else outer.resources_of_all(there, parallel)

    def capacity(self, trial: Trial) -> int:
        """Return how many workers this machine has cores and GPUs for; under an outer launcher, how many there are."""
        if self._outer is not None:
            return self._outer.world_size
        there = resources.detect()
        fit = there.cpus // trial.cpus_per_worker
        return min(fit, len(there.gpus) // trial.devices_per_worker) if trial.device == "cuda" else fit

    def launch(self, trial: Trial) -> Outcome:
        """Run the trial; see `pipeline.launch.base.Launcher`."""
        attempt = self.attempt(trial)
        path = self.session.folder / "trials" / f"{trial.name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(attempt.trial.model_dump_json(indent=1))
        if self._outer is not None and trial.workers > 1:
            return outer.launch(attempt, self._outer, self.stop)
        with attempt.listening(base.LOOPBACK) as address, TemporaryDirectory(prefix="pipeline-") as folder:
            job = {"trial": str(path.resolve()), "channel": str(address), "store": f"{folder}/store"}
            losses = self._run(trial, job, lost=attempt.lost)
        # The last connections are read at the end of the block.
        return attempt.outcome(losses or dict.fromkeys(attempt.lost, _how(0)))

    def _run(self, trial: Trial, job: dict[str, str], *, lost: Collection[int] = ()) -> dict[int, str]:
        """Run all ranks to their end; if some fail or are ``lost``, end the others. Return how these ended, by rank."""
        ranks: list[Process] = []
        is_default = signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL
        # SIGQUIT doesn't reach the workers, which have sessions of their own.
        with handle_signals(terminate, *([signal.SIGQUIT] if is_default else [])):
            try:
                ranks.extend(self._start_rank(number, trial, job) for number in range(trial.workers))
                losses = _await_ends(ranks, lost=lost)
            except BaseException as error:
                _end(ranks, interrupted=isinstance(error, KeyboardInterrupt))
                raise
        if losses:
            _end(ranks, patience_s=_LOSS_S)
        return losses

    def _start_rank(self, number: int, trial: Trial, job: dict[str, str]) -> Process:
        """Give a rank's job to a waiting process, or to a new one."""
        folder, node = self.session.log_folder(trial), os.uname().nodename
        rank = Rank(
            rank=number, local_rank=number, world_size=trial.workers, local_world_size=trial.workers, node=node
        )  # fmt: skip
        process = _waiting.pop(0) if _waiting else None
        if process is None or process.poll() is not None:  # its imports failed: those of a new one are logged
            process = _start(find_libraries(trial.experiment), None if self.session.verbose else folder, number)
        line = Job(**job, rank=rank, output="" if self.session.verbose else str(folder)).model_dump_json()
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(f"{line}\n".encode())
        return process


def find_libraries(experiment: Experiment) -> list[str]:
    """Return the libraries of built-in components, except torch; each worker imports the project's own packages."""
    targets = [component.target for _, component in components.iter_components(experiment)]
    return sorted({target.partition(".")[0] for target in targets if target.startswith(BUILT_IN)} - _IMPORTED)


def _start(libraries: Sequence[str], logs: Path | None, number: int = 0, *, quiet: bool = False) -> Process:
    """Start a process that imports what a rank needs and waits for its job; ``logs`` are for what fails before it."""
    streams = [(logs / f"rank{number}-{name}.log").open("ab") for name in ("stdout", "stderr")] if logs else []
    try:
        return subprocess.Popen(  # noqa: S603 - our own interpreter
            [sys.executable, "-c", _CODE, *libraries],
            stdin=subprocess.PIPE,
            stdout=streams[0] if streams else subprocess.DEVNULL if quiet else None,
            stderr=streams[1] if streams else subprocess.DEVNULL if quiet else None,
            start_new_session=True,  # Ctrl-C is for the driver
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # until the trial says how many
        )
    finally:
        for stream in streams:
            stream.close()


def _await_ends(ranks: Sequence[Process], *, lost: Collection[int]) -> dict[int, str]:
    """Wait until all ranks have ended, or one has failed or is lost, even with exit code 0; return how those ended."""
    while True:
        codes = dict(enumerate(rank.poll() for rank in ranks))
        failed = {rank: _how(code) for rank, code in codes.items() if code or (code == 0 and rank in lost)}
        if failed or None not in codes.values():
            return failed
        time.sleep(_POLL_S)


def _end(ranks: Sequence[Process], *, interrupted: bool = False, patience_s: float = _END_S) -> None:
    """End all ranks with the processes that they have started, at SIGTERM or, if the run was interrupted, at SIGINT."""
    first = {signal.SIGINT: _INTERRUPTED_S} if interrupted else {signal.SIGTERM: patience_s}
    for number, seconds in (first | {signal.SIGKILL: _END_S}).items():
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, number)  # includes loader processes of a rank that has ended
        deadline = time.monotonic() + seconds
        while None in [rank.poll() for rank in ranks] and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    for rank in ranks:
        if rank.stdin is not None:
            rank.stdin.close()


def _how(exit_code: int) -> str:
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    hint = "" if exit_code else " before the end of the training. Look for os._exit in your code and its libraries"
    return f"ended with exit code {exit_code}{hint}"
