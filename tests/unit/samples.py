"""Trials and what they measured, made up so that ratios can be worked out by hand."""

from pipeline.config.schema import Component, Experiment, Train
from pipeline.contract import Role, Spread, StepParts, Trial, TrialResult
from pipeline.events import Finished
from pipeline.speedup.report import Report

HARDWARE = "2 cores, 24 GiB, no GPU, Intel(R) Xeon(R) Processor @ 2.60GHz"


def trial(name: str, role: Role, *, strategy: str = "single", workers: int = 1, cpus: int = 1, gpus: int = 0) -> Trial:
    experiment = Experiment(
        name="resnet-digits",
        model=Component(_target_="pipeline.models.mlp"),
        data=Component(_target_="pipeline.data.digits"),
        loss=Component(_target_="torch.nn.CrossEntropyLoss"),
        optimizer=Component(_target_="torch.optim.SGD"),
        train=Train(epochs=2, global_batch_size=64),
    )
    return Trial(
        name=name, role=role, experiment=experiment, strategy=strategy, launcher="inprocess", workers=workers,
        devices_per_worker=gpus, device="cuda" if gpus else "cpu", cpus_per_worker=cpus,
    )  # fmt: skip


def spread(median: float, *, noise: float = 0.0, windows: int = 3) -> Spread:
    return Spread(median=median, low=median - noise, high=median + noise, windows=windows)


def parts(*, step_ms: float, communication: float | None = None, data_wait: float = 0.25) -> StepParts:
    return StepParts(
        step_ms=spread(step_ms),
        compute_ms=step_ms - (communication or 0) - data_wait - 1,
        exposed_communication_ms=communication,
        data_wait_ms=data_wait,
        rest_ms=1,
        ranks_ms=(step_ms,) * (1 if communication is None else 2),
        nodes=("node-1",) * (1 if communication is None else 2),
    )


def finished(
    name: str, throughput: Spread, *, communication: float | None = None, data_wait: float = 0.25, **more: object
) -> Finished:
    result = TrialResult(
        trial=name,
        steps=24,
        samples_per_second=throughput,
        step_ms=spread(64_000 / throughput.median),
        parts=parts(step_ms=64_000 / throughput.median, communication=communication, data_wait=data_wait),
        **{"peak_memory_mb": (410.0, 402.5), "gradient_mb": 2.8, **more},
    )
    return Finished(time=0.0, trial=name, result=result, time_to_first_step_s=6.24)


BASELINE = trial("baseline", "baseline")
ALL_CORES = trial("reference", "reference", cpus=2)
MAIN = trial("main", "main", strategy="ddp", workers=2)


def report() -> Report:
    """A baseline at 100 samples/s, one process with both cores at 180, and ddp x 2 at 190."""
    ends = [
        finished("main", spread(190, noise=2), communication=21.5, metrics={"validation/accuracy": 0.97345}),
        finished("reference", spread(180, noise=9)),
        finished("baseline", spread(100, noise=5)),
    ]
    return Report.of([MAIN, BASELINE, ALL_CORES], ends, hardware=HARDWARE)
