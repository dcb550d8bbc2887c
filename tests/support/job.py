"""The command as processes of its own, and what its run has recorded so far."""

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest
from command import Ended

from pipeline.errors import UsageError
from pipeline.protocol.events import AnyEvent
from pipeline.record import journal

PATIENCE_S = 400.0


class Recording:
    """A run's folder and journal."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def events(self) -> list[AnyEvent]:
        return list(journal.read(self.folder / journal.FILE_NAME))

    def all_of(self, kind: Any) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def series(self, name: str, *, trial: str = "main") -> list[tuple[int, float]]:
        """The points of a metric, each with its step."""
        events = (event for event in self.events if event.trial == trial)
        points = (point for event in events for point in getattr(event, "points", ()))
        return [(point.step, point.value) for point in points if point.name == name]

    @property
    def losses(self) -> list[tuple[int, float]]:
        return self.series("train/loss")


class Job(Recording):
    """Processes with one run, the only one in a folder; a context manager that leaves none of them behind."""

    def __init__(self, cwd: Path, *, runs: Path | None = None) -> None:
        super().__init__(runs or cwd / "runs")
        self.cwd = cwd
        self.processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            if process.stdout is not None and not process.stdout.closed:
                process.communicate()

    def start(self, *lines: Sequence[str], environments: Sequence[Mapping[str, str]] | None = None) -> Self:
        """Start a process for each command line, in place of earlier ones, which have ended."""
        self.__exit__()
        self.processes = [
            subprocess.Popen(
                line, env=environment, cwd=self.cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                process_group=0,
            )
            for line, environment in zip(lines, environments or [None] * len(lines), strict=True)
        ]  # fmt: skip
        return self

    @property
    def folder(self) -> Path:
        (folder,) = self._folder.iterdir()
        return folder

    @property
    def events(self) -> list[AnyEvent]:
        """So far; none as long as there is no journal."""
        journals = list(self._folder.glob(f"*/{journal.FILE_NAME}"))
        return list(journal.read(journals[0])) if journals else []

    def wait_for(self, condition: Callable[[], object], *, what: str) -> None:
        """Look until a condition is met, as long as all processes run."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with suppress(ValueError, OSError, UsageError):  # the journal is being written
                if condition():
                    return
            if any(process.poll() is not None for process in self.processes):
                pytest.fail(f"waited for {what}; the run ended: {self.ended()}")
            if time.monotonic() > deadline:
                self.__exit__()
                pytest.fail(f"waited {PATIENCE_S:.0f} s for {what}")
            time.sleep(0.02)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: any(last >= step for last, _ in self.losses[-1:]), what=f"step {step}")

    def ended(self, timeout_s: float = PATIENCE_S) -> list[Ended]:
        """Wait for the ends of all processes."""
        with ThreadPoolExecutor(len(self.processes)) as pool:  # pipes of a process that isn't read would fill up
            outputs = list(pool.map(lambda process: process.communicate(timeout=timeout_s), self.processes))
        return [Ended(process.returncode, *output) for process, output in zip(self.processes, outputs, strict=True)]
