"""Predicted against measured speedup on shaped links between network namespaces, and against published figures.

    sudo .venv/bin/python benchmarks/prediction.py            # some ten minutes on two idle cores
    sudo .venv/bin/python benchmarks/prediction.py sleeper    # some of the workloads only

Each case is measured with the trials of `pipeline benchmark --predict`: one worker alone, then several, each in a
namespace of its own (see `namespaces`). Two predictions are made of it: (a) from the link as it was configured and what
one worker measured alone, which is `--network`; (b) from the all-reduces that the workers measured. Four workers on two
cores take longer to compute than one alone; that factor is measured (`slowdown`) and given to both predictions. The
sleeper takes no core to compute, so it shows the model of exchange alone, with any number of workers.
Results: benchmarks/results/prediction.json, benchmarks/prediction.md.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import namespaces
import psutil
import published
from pydantic import BaseModel

from pipeline.errors import PipelineError, TrainingError, UsageError
from pipeline.experiment.load import load
from pipeline.experiment.schema import Configuration, Experiment
from pipeline.experiment.targets import allowed_packages
from pipeline.plan import resources
from pipeline.plan.plan import Planner
from pipeline.protocol.events import Failed, Finished, event_from_json
from pipeline.protocol.trial import CellMeasurement, Trial
from pipeline.protocol.trial_result import Link, TrialResult
from pipeline.results.prediction import Workload, fit_link, make_workload, predict

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "prediction.json"
PATIENCE_S, IDLE_PATIENCE_S = 180, 20
ATTEMPTS, DISTURBED = 2, 0.1
LINKS = [Link(latency_us=us, bandwidth_gbit=gbit) for gbit in (0.1, 1.0) for us in (100, 5000)]
MEASURE = ["benchmark.warmup_steps=2", "benchmark.steps=3", "benchmark.windows=3", "parallel.launcher=torchrun"]
WORKLOADS = {
    "sleeper": ("../benchmarks/sleeper.yaml", []),
    "small ResNet": ("resnet.yaml", ["train.global_batch_size=64", "data.image_size=24"]),
    "MLP with a large layer": ("mlp.yaml", ["train.global_batch_size=256", "model.hidden=[2048,512]"]),
    "small GPT": ("gpt.yaml", ["train.global_batch_size=32"]),
}
CASES = [(2, name) for name in WORKLOADS] + [(4, "sleeper"), (4, "small GPT")]


class Case(BaseModel):
    """One workload on one link, measured and predicted."""

    workload: str
    workers: int
    link: Link
    """As configured; latency one way."""
    slowdown: float
    """How much longer a worker computed beside the others than alone; given to the predictions with 4 workers."""
    fitted: Link
    """From the measured all-reduces."""
    others: float
    """Part of the machine's cores that processes of others took while it was measured."""
    measured: float
    """Speedup: throughput of all workers over that of one."""
    from_configured: float
    from_measured: float

    @property
    def errors(self) -> tuple[float, float]:
        """Of both predictions, relative to what was measured."""
        return self.from_configured / self.measured - 1, self.from_measured / self.measured - 1


class Results(BaseModel):
    """All that the benchmark found."""

    machine: str
    raw_links: dict[str, Link]
    """By configured link: what TCP sees of it."""
    cases: list[Case]
    published: list[published.Point]


def main() -> None:
    """Measure, and write both files."""
    namespaces.check()
    wanted = sys.argv[1:] or list(WORKLOADS)
    if unknown := set(wanted) - set(WORKLOADS):
        raise UsageError(f"no workload is called {min(unknown)}; choose from {', '.join(WORKLOADS)}")
    machine = resources.detect()
    results = Results(
        machine=f"{machine.processor}, {machine.summary}",
        raw_links=dict(_raw_links()),
        cases=[
            *_kept(wanted),
            *(c for workers, name in CASES if name in wanted for c in _cases(name, workers=workers)),
        ],
        published=published.points(),
    )
    RESULTS.write_text(results.model_dump_json(indent=1) + "\n")
    (HERE / "prediction.md").write_text(_markdown(results))


def _kept(wanted: list[str]) -> list[Case]:
    """What was found before of the workloads that are not measured again."""
    before = Results.model_validate_json(RESULTS.read_text()).cases if RESULTS.exists() else []
    return [case for case in before if case.workload not in wanted]


def _raw_links() -> Iterator[tuple[str, Link]]:
    for link in LINKS:
        with namespaces.Network(2, link=link) as network:
            raw = namespaces.measured_link(network, megabytes=2 if link.bandwidth_gbit < 1 else 16)
        print(f"{_name(link)}: {_name(raw)}", flush=True)
        yield _name(link), raw


def _cases(name: str, *, workers: int) -> Iterator[Case]:
    file, overrides = WORKLOADS[name]
    experiment = load(HERE.parent / "experiments" / file, [*overrides, *MEASURE]).experiment
    alone, others_before = _measured(_trial(experiment, workers=1))
    for link in LINKS:
        with namespaces.Network(workers, link=link) as network:
            together, others = _measured(_trial(experiment, workers=workers), network=network)
        others = max(others, others_before)
        case = _compared(experiment, alone, together, link=link, name=name, others=others)
        print(
            f"{name} x {workers}, {_name(link)}: {case.measured:.2f}x, {_errors(case.errors)}, "
            f"contention {case.slowdown:.2f}",
            flush=True,
        )
        yield case


def _compared(
    experiment: Experiment, alone: TrialResult, together: TrialResult, *, link: Link, name: str, others: float
) -> Case:
    assert together.costs is not None
    workers = together.costs.world_size
    workload = _workload(experiment, alone, together)
    unaware = workload if workers > 2 else _workload(experiment, alone)
    fitted = fit_link(together.costs.all_reduces, workers=workers, backend="gloo")
    return Case(
        workload=name,
        workers=workers,
        link=link,
        slowdown=workload.slowdown,
        others=others,
        fitted=fitted,
        measured=together.samples_per_second.median / alone.samples_per_second.median,
        from_configured=predict(unaware, link, workers=workers).speedup,
        from_measured=predict(workload, fitted, workers=workers).speedup,
    )


def _workload(experiment: Experiment, alone: TrialResult, together: TrialResult | None = None) -> Workload:
    assert alone.costs is not None
    return make_workload(
        experiment,
        alone.costs,
        rest_ms=alone.parts.rest_ms or 0.0,
        step_ms=alone.step_ms.median,
        together=together.costs if together else None,
        backend="gloo",
    )


def _trial(experiment: Experiment, *, workers: int) -> Trial:
    """A measurement with one thread for each worker, whether or not there are as many cores."""
    detected = resources.detect()
    allowed = (*allowed_packages(), "sleeper")
    planner = Planner(experiment, detected.model_copy(update={"cpus": workers}), allowed, workers=workers)
    strategy, options = ("ddp", experiment.parallel.options) if workers > 1 else ("single", {})
    entry = Configuration(strategy=strategy, workers=workers, options=options)
    return planner.trial(CellMeasurement, entry, measures_costs=True)


def _measured(trial: Trial, *, network: namespaces.Network | None = None) -> tuple[TrialResult, float]:
    """The least disturbed of some attempts, and the part of the machine's cores that others took meanwhile."""
    attempts: list[tuple[TrialResult, float]] = []
    while len(attempts) < ATTEMPTS and (not attempts or attempts[-1][1] > DISTURBED):
        _wait_until_idle()
        busy, own, start = _busy_s(), _own_s(network), time.monotonic()
        result = _run(trial, network=network)
        foreign = (_busy_s() - busy) - (_own_s(network) - own)
        attempts.append((result, foreign / (time.monotonic() - start) / (os.cpu_count() or 1)))
    return min(attempts, key=lambda attempt: attempt[1])


def _wait_until_idle() -> None:
    deadline = time.monotonic() + IDLE_PATIENCE_S
    while psutil.cpu_percent(interval=2) > 100 * DISTURBED and time.monotonic() < deadline:
        pass


def _busy_s() -> float:
    """Seconds that all cores have computed since the machine started."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def _own_s(network: namespaces.Network | None) -> float:
    """Those of this benchmark's processes that have ended, and of the delay line."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime + (network.busy_s if network else 0.0)


def _run(trial: Trial, *, network: namespaces.Network | None) -> TrialResult:
    """Run a trial, each worker in its namespace.

    Raises:
        TrainingError: a worker failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trial.json"
        path.write_text(trial.model_dump_json())
        command = [sys.executable, "-m", "pipeline.worker", str(path)]
        ranks = [
            subprocess.Popen(
                network.inside(rank, command) if network else command,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(sys.path),
                    "OMP_NUM_THREADS": "1",
                    "GLOO_SOCKET_IFNAME": "eth0" if network else "lo",
                }
                | _rank_variables(rank, trial.workers),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(trial.workers)
        ]
        try:
            outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    events = [event_from_json(line) for output in outputs for line in output.splitlines() if line.startswith("{")]
    for event in events:
        if isinstance(event, Failed):
            raise TrainingError(f"rank {event.rank.rank}: {event.error}", event.traceback)
    return next(event.result for event in events if isinstance(event, Finished))


def _rank_variables(rank: int, workers: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": namespaces.address(0),
        "MASTER_PORT": "29500",
    }


def _markdown(results: Results) -> str:
    lines = [
        "# Predicted and measured speedup",
        "",
        f"Made by `benchmarks/prediction.py` on {results.machine}.",
        "Workers with one thread each, gloo, strong scaling, in network namespaces joined by a link that",
        "is shaped on each sender's side; latency is one way.",
        "",
        "| link | as TCP sees it |",
        "|---|---|",
        *(f"| {name} | {_name(raw)} |" for name, raw in results.raw_links.items()),
        "",
        "(a) predicts from the configured link and one worker alone, (b) from the all-reduces that the workers",
        "measured. Errors are relative to the measured speedup. Others: the part of the cores that other processes of",
        "the machine took meanwhile. Contention: how much longer a worker computed beside the others than alone.",
        "",
        "| workload | workers | link | others | contention | measured | (a) | error | (b) | error | fitted link |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *map(_row, results.cases),
        "",
        *(_summary(label, [case.errors[i] for case in results.cases]) for i, label in enumerate(("(a)", "(b)"))),
        "",
        *published.table(results.published),
    ]
    return "\n".join(lines) + "\n"


def _row(case: Case) -> str:
    configured, measured = case.errors
    return (
        f"| {case.workload} | {case.workers} | {_name(case.link)} | {case.others:.0%} | {case.slowdown:.2f} | "
        f"{case.measured:.2f} | {case.from_configured:.2f} | {configured:+.0%} | {case.from_measured:.2f} | "
        f"{measured:+.0%} | {_name(case.fitted)} |"
    )


def _summary(label: str, errors: list[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"- {label}: median error {median(sizes):.0%}, worst {max(errors, key=abs):+.0%}, {len(errors)} cases"


def _errors(errors: tuple[float, float]) -> str:
    return "errors " + ", ".join(f"{error:+.0%}" for error in errors)


def _name(link: Link) -> str:
    rate = (
        f"{1e3 * link.bandwidth_gbit:.3g} Mbit/s"
        if link.bandwidth_gbit < 0.9995
        else f"{link.bandwidth_gbit:.3g} Gbit/s"
    )
    return f"{rate}, {link.latency_us / 1e3:.2g} ms"


if __name__ == "__main__":
    try:
        main()
    except PipelineError as error:
        sys.exit(f"error: {error}")
