"""``pipeline run FILE FILE ...``: one run after the other, each in a process of its own, and a table of all at the end.

A process for each: a crash, or what user code leaves behind, concerns one run only.
"""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.commands.history.run_list import show_runs
from pipeline.commands.history.run_result import result_of
from pipeline.config.load import ExperimentFile
from pipeline.driver.resume import altered, newest
from pipeline.errors import Terminated, TrainingError, UsageError
from pipeline.recording.journal.folder import read_state, read_status, runs_named
from pipeline.recording.journal.run_summary import RunSummary, summarized
from pipeline.recording.terminal.terminal import Terminal, write
from pipeline.wording import counted

_INTERRUPTED = (130, 143)


class EndedRun(NamedTuple):
    """A run that has ended."""

    path: str
    exit_code: int
    output: str
    """Its standard output with ``--json``; empty otherwise."""
    run: RunSummary | None
    """None if it ended before it started."""

    def to_mapping(self) -> dict[str, Any]:
        """Return what ``--json`` prints of it."""
        return {"file": self.path, "exit_code": self.exit_code, "run": self.run.run if self.run else None}


def run_several(
    files: Sequence[ExperimentFile], words: Sequence[str], *, resume: str | None, terminal: Terminal, as_json: bool
) -> list[EndedRun]:
    """Run experiments one after the other. A failure does not stop the others.

    Args:
        files: the experiments, which are checked already.
        words: overrides and options of all of them.
        resume: ``latest`` to continue: runs that completed stay, others are resumed, or started.
        terminal: gets a line before each run.
        as_json: True to keep their output.

    Raises:
        UsageError: ``resume`` names a single run.
        KeyboardInterrupt: a run was interrupted, which ends all.
    """
    if resume not in (None, "latest"):
        raise UsageError(f"--resume {resume}: several files are named. Use --resume without a run.")
    ended = []
    for number, file in enumerate(files, 1):
        title = f"{number} of {len(files)}: {file.path}"
        before = _find_earlier(file) if resume is not None else None
        if before is not None and _is_complete(file, before):
            write(terminal.progress, f"{title} completed before: {before.name}")
            summary = summarized(before)
            result = result_of(summary) if as_json and summary is not None else None
            ended.append(EndedRun(str(file.path), 0, result.to_json() if result else "", summary))
            continue
        write(terminal.progress, title, style="bold")
        more = ["--resume", before.name] if before is not None else []
        ended.append(_run(file, [*words, *more], keeps_output=as_json, resumed=before))
    return ended


def _find_earlier(file: ExperimentFile) -> Path | None:
    try:
        return newest(file)
    except UsageError:  # all its runs are of another file with the same name
        return None


def _is_complete(file: ExperimentFile, before: Path) -> bool:
    """Return True if a run has completed, and nothing has changed that affects what it trains."""
    return read_status(before) == "FINISHED" and not altered(file, read_state(before))


def _run(file: ExperimentFile, words: Sequence[str], *, keeps_output: bool, resumed: Path | None) -> EndedRun:
    """Run a command to its end.

    Raises:
        KeyboardInterrupt: it was interrupted.
    """
    started = time.time()
    process = subprocess.Popen(  # noqa: S603 - what the user has typed, without a shell
        [sys.executable, "-m", "pipeline", "run", str(file.path), *words],
        stdout=subprocess.PIPE if keeps_output else None,
        text=True,
    )
    try:
        output, _ = process.communicate()
    except KeyboardInterrupt as error:
        if isinstance(error, Terminated):  # Ctrl-C the terminal has sent to the run, too; it saves a checkpoint
            process.terminate()
        process.wait()
        raise
    if process.returncode in _INTERRUPTED:
        raise KeyboardInterrupt
    folder = resumed or next(_find_runs(file, since=started), None)
    return EndedRun(str(file.path), process.returncode, output or "", summarized(folder) if folder else None)


def _find_runs(file: ExperimentFile, *, since: float) -> Iterator[Path]:
    """Yield the runs of a file that started after a time, the newest first."""
    tracking = file.experiment.tracking
    for folder, opened in runs_named(Path(tracking.directory), name=file.experiment.name):
        if opened.time >= since and opened.file in ("", file.source):
            yield folder


def show_several(ended: Sequence[EndedRun], *, terminal: Terminal) -> None:
    """Print a table of the runs, and name those that failed.

    Raises:
        TrainingError: some failed.
    """
    found = [one.run for one in ended if one.run is not None]
    if found:
        terminal.result.print()
        show_runs(found, now=datetime.now(UTC), console=terminal.result)
    if failed := [f"{one.path} (exit code {one.exit_code})" for one in ended if one.exit_code]:
        raise TrainingError(f"{counted(len(failed), 'run')} of {len(ended)} failed: {', '.join(failed)}")
