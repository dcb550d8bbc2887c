"""Worker processes on this machine, started by torch's elastic agent, which is what ``torchrun`` is.

A run that is itself started by ``torchrun`` doesn't start processes of its own: it joins those there are. Rank 0 is
then driver and worker, the others are only workers.
"""

import logging
import os
import signal
import sys
from contextlib import suppress
from typing import Self

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pipeline import resources, worker
from pipeline.channel.inbox import Inbox
from pipeline.channel.wire import Address
from pipeline.config.parallel import Parallel
from pipeline.contract import Rank, Trial
from pipeline.errors import Terminated
from pipeline.launchers import _loopback
from pipeline.launchers._vigil import Vigil
from pipeline.launchers.base import DirectOutbox, Session, WorkersLost, environment, outer_rank, own_signals
from pipeline.resources import Resources

_LOOPBACK = "127.0.0.1"


class Launcher:
    """Starts ``python -m pipeline.worker`` once for each rank."""

    many_processes = True

    def __init__(self, session: Session) -> None:
        self.session = session

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The agent has ended its processes."""

    @staticmethod
    def resources(parallel: Parallel) -> Resources:
        """This machine."""
        return resources.detect()

    def room(self, trial: Trial) -> int:
        """As many as this machine has cores and GPUs for, whoever uses them; those there are under ``torchrun``."""
        if outer_rank() is not None:
            return int(os.environ["WORLD_SIZE"])
        there = resources.detect()
        fit = there.cpus // trial.cpus_per_worker
        return min(fit, len(there.gpus) // trial.devices_per_worker) if trial.device == "cuda" else fit

    def launch(self, trial: Trial) -> None:
        """Run the trial; see `pipeline.launchers.base.Launcher`."""
        if outer_rank() is not None:
            rank = worker.rank_from_environment() if trial.workers > 1 else Rank()
            with suppress(worker.WorkerFailed):  # it has been reported
                worker.run(trial, rank=rank, outbox=DirectOutbox(self.session))
            return
        # What it would say on stderr about a failed rank, the rank and the driver say better.
        logging.getLogger("torch.distributed.elastic").setLevel(
            logging.INFO if self.session.verbose else logging.CRITICAL
        )
        folder = self.session.folder / "trials"
        folder.mkdir(exist_ok=True)
        assignment, channel = folder / f"{trial.name}.json", folder / f"{trial.name}.channel"
        assignment.write_text(trial.model_dump_json(indent=1))
        vigil = Vigil(trial, receive=self.session.receive)
        inbox = Inbox(host=_LOOPBACK, receive=vigil.receive, folder=self.session.folder)
        try:
            # The agent sets TORCHELASTIC_SIGNALS_TO_HANDLE in this process.
            with (
                vigil,
                inbox,
                self.session.stop.telling(inbox.ask_to_stop),
                own_signals(),
                environment(OMP_NUM_THREADS=str(trial.cpus_per_worker), TORCHELASTIC_SIGNALS_TO_HANDLE=None),
            ):
                _write_secret(channel, inbox.address)
                launch = elastic_launch(self._config(trial), entrypoint=sys.executable)
                launch("-m", "pipeline.worker", str(assignment), "--channel", str(channel))
        except ChildFailedError as error:
            raise WorkersLost(_losses(error)) from None
        except SignalException as error:
            raise (KeyboardInterrupt if error.sigval is signal.SIGINT else Terminated) from None
        finally:
            channel.unlink(missing_ok=True)

    def _config(self, trial: Trial) -> LaunchConfig:
        return LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=trial.workers,
            run_id=f"{self.session.folder.name}-{trial.name}",
            rdzv_backend=_loopback.NAME,
            rdzv_endpoint=f"{_LOOPBACK}:0",
            rdzv_configs={"join_timeout": trial.experiment.parallel.start_timeout_s},
            local_addr=_LOOPBACK,
            max_restarts=0,
            monitor_interval=0.1,
            signals_to_handle="SIGINT,SIGHUP,SIGQUIT",  # SIGTERM is the driver's, which lets the workers finish
            logs_specs=_RankLogs(log_dir=None if self.session.verbose else str(self.session.log_folder(trial))),
        )


class _RankLogs(LogsSpecs):
    """One file for each rank and stream, as the other launchers name them; without a folder, the terminal."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The files of each rank."""

        def files(stream: str) -> dict[int, str]:
            folder = self._root_log_dir
            return {rank: f"{folder}/rank{rank}-{stream}.log" if folder else "" for rank in envs}

        return LogsDest(stdouts=files("stdout"), stderrs=files("stderr"), error_files=dict.fromkeys(envs, os.devnull))

    @property
    def root_log_dir(self) -> str:
        """The folder of all files."""
        return self._root_log_dir or ""


def _write_secret(path: "os.PathLike[str]", address: Address) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(address.model_dump_json())


def _losses(error: ChildFailedError) -> dict[int, str]:
    """How ranks ended, without those that the agent itself ended with SIGTERM because of another one."""
    codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
    own = {rank: code for rank, code in codes.items() if code != -signal.SIGTERM} or codes
    return {rank: _how(code) for rank, code in own.items()}


def _how(exit_code: int) -> str:
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"ended with exit code {exit_code}"
