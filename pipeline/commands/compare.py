"""``pipeline compare``: make sure that the trainings of all variants are there, pair them, and say which is better."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, NamedTuple

import psutil

from pipeline.commands.compared_runs import OF_RECORD, Question, Variant, make_result, name_variant, read_training
from pipeline.commands.invocation import invoked, planning, refuse_outer_launcher
from pipeline.drive.resume import find_runs, warn_of_damage
from pipeline.errors import Problem, ResourceError, TrainingError, UsageError
from pipeline.experiment.load import ExperimentFile, flatten
from pipeline.experiment.reported import PREFIX, source_of
from pipeline.experiment.schema import Experiment
from pipeline.plan.plan import Plan, make_plan
from pipeline.plan.resources import visible_gpus
from pipeline.protocol.events import RunOpened
from pipeline.record import journal, provenance
from pipeline.record.folder import ENVIRONMENT_NAME, read_status
from pipeline.record.runs import summarize_run
from pipeline.record.screen import Terminal, write
from pipeline.results import record, texts
from pipeline.results.record import Result, Table
from pipeline.system import kill_tree
from pipeline.wording import approximate, counted, did_you_mean

COMPARISON = "comparison"  # Tag of a comparison: what it compares
TURN = "trained_in_turn"
"""Tag of trainings that had the machine to themselves: the comparison for which they ran one after the other."""
_CORES = "parallel.cpus_per_worker"
_LOAD_S, _MUCH_LOAD, _LOOK_S, _MORE_GRACE_S = 1.0, 0.1, 0.1, 30.0


def identify(experiment: Experiment) -> dict[str, str]:
    """Return the settings that must be the same for a recorded run to count as a training of this experiment."""
    aside = OF_RECORD if experiment.parallel.cpus_per_worker else (*OF_RECORD, _CORES)
    return {key: value for key, value in flatten(experiment).items() if not key.startswith(aside)}


class Origin(NamedTuple):
    """Code and packages that a run must share with one of now to count as the same, besides experiment and hardware."""

    commit: str  # Commit of the user's code; empty without git
    is_clean: bool  # True if all of it is in that commit
    changed_at: float  # Time of the newest change of a Python file, for code that is in no commit
    packages: str  # Text of environment.txt: Python, platform and installed packages

    @classmethod
    def now(cls) -> "Origin":
        """Return that of a run that would start now."""
        commit = provenance.git("rev-parse", "HEAD")
        listed = provenance.git("ls-files", "--cached", "--others", "--exclude-standard", "*.py").splitlines()
        paths = [Path(name) for name in listed] if commit else [*Path().glob("*.py"), *Path().glob("[!.]*/**/*.py")]
        changed_at = max((path.stat().st_mtime for path in paths if path.is_file()), default=0.0)
        is_clean = bool(commit) and not provenance.git("status", "--porcelain")
        return cls(commit, is_clean, changed_at, provenance.list_packages())

    def is_of(self, opened: RunOpened, folder: Path) -> bool:
        """Return True if a session of a run had the same code and packages."""
        is_committed = self.is_clean and opened.tags.get("git_dirty") == "false"
        is_same = opened.tags.get("git_commit", "") == self.commit and (is_committed or opened.time >= self.changed_at)
        try:
            return is_same and (folder / ENVIRONMENT_NAME).read_text(encoding="utf-8") == self.packages
        except OSError:
            return False


class Same(NamedTuple):
    """Runs of an experiment that are there."""

    complete: Mapping[int, Path]  # Newest completed one by seed
    stopped: Mapping[int, Path]  # Newest one that was interrupted, of seeds of which none is complete
    others: int  # Completed ones that don't count: of other code, packages or hardware


def find_same(file: ExperimentFile, origin: Origin, *, hardware: str, turn: str, seeds: Sequence[int]) -> Same:
    """Find the runs of an experiment with these seeds that are there; with ``turn`` only those trained in that turn."""
    wanted, complete, stopped, others = identify(file.experiment), dict[int, Path](), dict[int, Path](), 0
    for folder, first in find_runs(file.experiment):
        seed = first.params.get("seed", "")
        if not seed.isdecimal() or int(seed) not in seeds or int(seed) in complete:
            continue
        try:
            sessions = [one for one in journal.read(folder / journal.FILE_NAME) if isinstance(one, RunOpened)]
        except UsageError as error:
            warn_of_damage(str(error))
            continue
        aside = OF_RECORD if _CORES in wanted else (*OF_RECORD, _CORES)
        if any({k: v for k, v in one.params.items() if not k.startswith(aside)} != wanted for one in sessions):
            continue
        status = read_status(folder)
        if status == "RUNNING":
            raise UsageError(f"{folder} is running, and trains what is to be compared. Wait for it, or stop it")
        machines = {_count_no_gpus(one.tags.get("hardware", "")) for one in sessions}
        is_same = machines == {_count_no_gpus(hardware)} and all(origin.is_of(one, folder) for one in sessions)
        if is_same and turn:
            is_same = all(one.tags.get(TURN) == turn for one in sessions) and len(sessions) == 1
        if status == "FINISHED" and is_same:
            complete[int(seed)] = folder
        elif status == "FINISHED":
            others += 1
        elif status == "KILLED" and is_same and not turn:
            stopped.setdefault(int(seed), folder)
    return Same(complete, {seed: folder for seed, folder in stopped.items() if seed not in complete}, others)


def _count_no_gpus(hardware: str) -> str:
    """Return a machine without the number of its GPUs: trainings side by side see some of them each."""
    return re.sub(r"\d+ x ", "", hardware)


class _Planned(NamedTuple):
    """A variant to train."""

    name: str
    description: str
    file: ExperimentFile
    plan: Plan
    cores: int | None  # Cores of a worker, if several trainings share the machine

    @property
    def hardware(self) -> str:
        return provenance.hardware(self.plan)


class _Todo(NamedTuple):
    """A training that is missing."""

    variant: _Planned
    seed: int
    stopped: Path | None  # Run to resume

    @property
    def title(self) -> str:
        return f"{self.variant.name}, seed {self.seed}"


class Comparison(NamedTuple):
    """Trainings of a comparison: which are there, and which are missing."""

    variants: tuple[_Planned, ...]
    question: Question
    seeds: tuple[int, ...]
    concurrent: int
    key: str  # Hash of what is compared

    def find(self) -> list[Same]:
        """Find the runs that are there, of each variant."""
        turn = self.key if self.question.is_timed else ""
        find = partial(find_same, origin=Origin.now(), turn=turn, seeds=self.seeds)
        return [find(one.file, hardware=one.hardware) for one in self.variants]

    def list_missing(self, there: Sequence[Same]) -> list[_Todo]:
        """Return the trainings that are missing, in the order in which they start: A B, B A, A B, ...

        If times are compared, those of a pair are all trained again, one after the other.
        """
        missing: list[_Todo] = []
        for number, seed in enumerate(self.seeds):
            both = list(zip(self.variants, there, strict=True))[:: -1 if number % 2 else 1]
            is_whole = all(seed in same.complete for _, same in both)
            missing += [
                _Todo(one, seed, same.stopped.get(seed))
                for one, same in both
                if seed not in same.complete or (self.question.is_timed and not is_whole)
            ]
        return missing

    def describe(self) -> str:
        """Describe it in lines, for ``--dry-run``."""
        missing = self.list_missing(self.find())
        experiment = self.variants[0].file.experiment
        metric = (
            self.question.metric or experiment.checkpoint.best or f"{PREFIX}{next(iter(experiment.metrics), 'loss')}"
        )
        lines = [
            *(f"{one.name}            {one.description}" for one in self.variants),
            f"compared by  {metric}",
            f"pairs        {len(self.seeds)}, seeds {self.seeds[0]} to {self.seeds[-1]}",
            f"machine      {self.variants[0].plan.resources.summary}",
            f"trainings    {len(missing)} of {len(self.seeds) * len(self.variants)} to run, "
            + ("one at a time, in turn" if self.question.is_timed else f"{self.concurrent} at a time"),
            *(f"  {one.title}{f', continues {one.stopped.name}' if one.stopped else ''}" for one in missing),
        ]
        return "\n".join(lines)


def plan_comparison(
    variants: Sequence[tuple[str, ExperimentFile]], question: Question, *, pairs: int, concurrent: int = 1
) -> Comparison:
    """Check all variants, and plan their trainings."""
    refuse_outer_launcher("compare")
    identities = [identify(file.experiment) for _, file in variants]
    if not _list_differing(identities):
        raise UsageError("the variants have the same settings. Give them at least one that differs.")
    planned = []
    for number, (description, file) in enumerate(variants):
        parallel = file.experiment.parallel
        with planning(file) as (allowed, resources):
            if parallel.is_elastic:
                message = f"is {list(parallel.worker_counts)}. A comparison needs one number."
                raise file.explain([Problem("parallel.workers", message)])
            _check_metric(file, question)
            is_shared = concurrent > 1 and not parallel.address and not parallel.cpus_per_worker
            cores = max(1, resources.cpus // (concurrent * parallel.workers)) if is_shared else None
            own = parallel.model_copy(update={"cpus_per_worker": cores or parallel.cpus_per_worker})
            experiment = file.experiment.model_copy(update={"parallel": own})
            plan = make_plan(experiment, resources, allowed=allowed, with_baseline=False, train_only=True)
        main = plan.main
        at_once = resources.cpus // (main.workers * main.cpus_per_worker)
        if main.devices_per_worker:
            at_once = min(at_once, len(resources.gpus) // (main.workers * main.devices_per_worker))
        if 1 < concurrent > at_once and not parallel.address:
            raise ResourceError(
                f"--concurrent {concurrent}: {resources.node} ({resources.summary}) has room for "
                f"{counted(max(1, at_once), 'training')} of {main.title} at a time. Use at most {max(1, at_once)}."
            )
        planned.append(_Planned(name_variant(number), description, file, plan, cores))
    first = variants[0][1].experiment.seed
    key = hashlib.sha256(json.dumps(identities, sort_keys=True).encode()).hexdigest()[:12]
    seeds = tuple(range(first, first + pairs))
    return Comparison(tuple(planned), question, seeds, 1 if question.is_timed else concurrent, key)


def _check_metric(file: ExperimentFile, question: Question) -> None:
    """Raise UsageError if a file has no such metric."""
    known = [*file.experiment.metrics, "loss"]
    name = (question.metric or "loss").removeprefix("test/").removeprefix(PREFIX)
    if source_of(f"{PREFIX}{name}", file.experiment.metrics) is None:
        hint = did_you_mean(name, known) or f"; {file.path} has {', '.join(known)}"
        raise UsageError(f"--metric {name}: there is no such metric{hint}")


def _list_differing(settings: Sequence[Mapping[str, str]]) -> dict[str, tuple[str | None, ...]]:
    """Return the keys whose values differ between variants, with the value of each; None: not set."""
    keys = dict.fromkeys(key for one in settings for key in one if key != "name")
    found = {key: tuple(one.get(key) for one in settings) for key in keys}
    return {key: values for key, values in found.items() if len(set(values)) > 1}


def compare_files(
    comparison: Comparison,
    *,
    terminal: Terminal,
    verbose: bool = False,
    show: Callable[[Result, Path], None] | None = None,
) -> None:
    """Train what is missing, and end in the answer, which is recorded as a run of its own."""
    there = comparison.find()
    tell, notes = partial(write, terminal.progress), list[str]()
    for note in dict.fromkeys(
        note for one in comparison.variants for note in one.plan.notes if not note.startswith("--train-only")
    ):
        tell(f"note: {note}")
    if len({one.file.experiment.seed for one in comparison.variants}) > 1:
        notes.append(f"The variants have different seeds. All pairs start at {comparison.seeds[0]}.")
    if len({one.file.experiment.checkpoint.best for one in comparison.variants}) > 1:
        notes.append("checkpoint.best differs: values at the best step are compared with values at another step.")
    if others := sum(same.others for same in there):
        reason = "other code, packages or hardware" + (", or not in turn" if comparison.question.is_timed else "")
        notes.append(f"{counted(others, 'run')} of the same experiments do not count: {reason}")
    failures: list[str] = []
    if missing := comparison.list_missing(there):
        load = psutil.cpu_percent(interval=_LOAD_S) / 100 if comparison.question.is_timed else 0.0
        if load > _MUCH_LOAD:
            notes.append(f"Other processes used {load:.0%} of the cores at the start: times may be too long")
        failures = _train(missing, comparison, tell=tell, verbose=verbose)
        there = comparison.find()
    variants = []
    for one, same in zip(comparison.variants, there, strict=True):
        found = {seed: summarize_run(same.complete[seed]) for seed in comparison.seeds if seed in same.complete}
        runs = {seed: read_training(summary) for seed, summary in found.items() if summary is not None}
        variants.append(Variant(one.name, one.description, runs))
    if not all(one.runs for one in variants):
        why = failures[0] if failures else "code or packages have changed meanwhile"
        raise TrainingError(f"all trainings of a variant failed. The first error: {why}")
    notes += [f"{failure} does not count" for failure in failures]
    first = comparison.variants[0]
    result = make_result(variants, comparison.question, notes=notes, can_train=True)
    seeds = f"seeds {comparison.seeds[0]} to {comparison.seeds[-1]}"
    trained = counted(sum(len(one.runs) for one in variants), "training")
    differing = _list_differing([identify(one.file.experiment) for one in comparison.variants])
    settings = Table(
        title="Settings that differ",
        header=("", *(one.name for one in comparison.variants)),
        rows=tuple((key, *(value or "-" for value in values)) for key, values in differing.items()),
    )
    result = result.model_copy(
        update={
            "name": first.file.experiment.name,
            "title": f"{first.file.experiment.name}: {counted(len(variants), 'variant')} compared ({trained}, {seeds}; "
            f"{first.plan.resources.summary})",
            "hardware": first.hardware,
            "tables": (*result.tables, settings),
        }
    )
    if (before := _find_look(result, comparison)) is not None:
        result = result.model_copy(update={"notes": (before, *result.notes)})
    tracking = first.file.experiment.tracking
    tagged = tracking.model_copy(update={"tags": {**tracking.tags, COMPARISON: comparison.key}})
    experiment = first.file.experiment.model_copy(update={"tracking": tagged})
    plan = first.plan.model_copy(update={"command": "compare", "experiment": experiment, "notes": ()})
    with invoked(plan, file=first.file, terminal=terminal, verbose=verbose, show=show) as invocation:
        invocation.finish(result)
    if failures:
        raise TrainingError(f"{'; '.join(failures)}. The same command trains again what failed")


def _train(
    missing: Sequence[_Todo], comparison: Comparison, *, tell: Callable[[str], None], verbose: bool
) -> list[str]:
    """Train what is missing with ``pipeline run``; return what failed, with the reason."""
    waiting, running, failures = deque(enumerate(missing)), dict[int, _Process](), list[str]()
    free, gpus = deque(range(comparison.concurrent)), [*visible_gpus()]
    share, began, done = len(gpus) // comparison.concurrent, time.monotonic(), 0
    try:
        while waiting or running:
            while waiting and free:
                number, todo = waiting.popleft()
                slot = free.popleft()
                own = gpus[slot * share : (slot + 1) * share] if comparison.concurrent > 1 and gpus else []
                tell(f"training {todo.title} ({number + 1} of {len(missing)})")
                running[slot] = _start(todo, comparison, gpus=own, verbose=verbose)
            time.sleep(_LOOK_S)
            for slot, process in list(running.items()):
                if (code := process.popen.poll()) is None:
                    continue
                del running[slot]
                free.append(slot)
                done += 1
                left = approximate((time.monotonic() - began) / done * (len(missing) - done))
                more = f", about {left} left" if done < len(missing) else ""
                if code:
                    failures.append(f"{process.title}: {process.read_error() or f'exit code {code}'}")
                    tell(f"{failures[-1]}{more}")
                else:
                    tell(f"{process.title} is trained{more}")
    except KeyboardInterrupt as error:
        for process in running.values():
            process.popen.send_signal(signal.SIGTERM)
        deadline = (
            time.monotonic() + _MORE_GRACE_S + max(one.file.experiment.parallel.grace_s for one in comparison.variants)
        )
        for process in running.values():
            try:
                process.popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                kill_tree(process.popen.pid)
        error.add_note(f"{done} of {len(missing)} missing trainings are done; the same command continues")
        raise
    return failures


class _Process(NamedTuple):
    """A running training."""

    title: str
    popen: "subprocess.Popen[bytes]"
    output: IO[bytes]

    def read_error(self) -> str:
        """Return the first error that it has printed, or else its last line."""
        self.output.seek(0)
        lines = [line for line in self.output.read().decode(errors="replace").splitlines() if line.strip()]
        found = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (found or lines[-1:] or [""])[0]


def _start(todo: _Todo, comparison: Comparison, *, gpus: Sequence[str], verbose: bool) -> _Process:
    """Start a training, in a process group of its own, so that Ctrl-C does not reach it twice."""
    file = todo.variant.file
    words = ["run", str(file.path), "tracking.log_model=false", *file.overrides, f"seed={todo.seed}", "--train-only"]
    words += [f"parallel.cpus_per_worker={todo.variant.cores}"] if todo.variant.cores else []
    words += [f"tracking.tags.{TURN}={comparison.key}"] if comparison.question.is_timed else []
    if todo.stopped is not None:
        words += ["--resume", todo.stopped.name]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
    output = TemporaryFile()  # noqa: SIM115 - as long as the process
    shown = sys.stderr if verbose else output
    command = [sys.executable, "-m", "pipeline", *words]
    popen = subprocess.Popen(command, env=environment, process_group=0, stdout=shown, stderr=shown)  # noqa: S603 - ours
    return _Process(todo.title, popen, output)


def _find_look(result: Result, comparison: Comparison) -> str | None:
    """Return a note if the same was answered before from fewer pairs."""
    experiment, pairs = comparison.variants[0].file.experiment, result.fact("pairs")
    for folder, opened in find_runs(experiment, role="compare"):
        if opened.tags.get(COMPARISON) != comparison.key:
            continue
        try:
            before = record.read(folder)
        except UsageError:  # it is damaged
            continue
        known = before.fact("pairs") if before is not None else None
        if before and known and pairs and known.value and pairs.value and known.value < pairs.value:
            return texts.EXTENDED.format(pairs=counted(int(known.value), "pair"), verdict=before.verdict)
    return None
