"""Trials and what they measured, made up so that ratios can be worked out by hand."""

from pipeline.experiment.schema import Experiment
from pipeline.experiment.train import Optimizer, Train
from pipeline.experiment.values import Component
from pipeline.protocol.events import Finished
from pipeline.protocol.trial import ROLES, Role, Trial
from pipeline.protocol.trial_result import Spread, StepParts, TrialResult
from pipeline.results.speedup import Row, measure_rows

HARDWARE = "2 cores, 24 GiB, no GPU, Intel(R) Xeon(R) Processor @ 2.60GHz"


def trial(
    name: str,
    role: Role,
    *,
    strategy: str = "single",
    workers: int = 1,
    cpus: int = 1,
    gpus: int = 0,
    batch: int = 64,
) -> Trial:
    experiment = Experiment(
        name="resnet-digits",
        model=Component(_target_="pipeline.models.mlp"),
        data=Component(_target_="pipeline.data.digits"),
        loss=Component(_target_="torch.nn.CrossEntropyLoss"),
        optimizer=Optimizer(_target_="torch.optim.SGD"),
        train=Train(epochs=2, global_batch_size=batch),
    )
    return ROLES[role](
        name=name, role=role, experiment=experiment, strategy=strategy, launcher="inprocess", workers=workers,
        devices_per_worker=gpus, device="cuda" if gpus else "cpu", cpus_per_worker=cpus,
    )  # fmt: skip


def spread(median: float, *, noise: float = 0.0, windows: int = 3) -> Spread:
    return Spread(median=median, low=median - noise, high=median + noise, windows=windows)


def in_turn(rate: float, *, noise: float = 0.0, pairs: int = 8) -> tuple[float, ...]:
    """Slots whose geometric mean is the rate: above it and below it alternately, by that fraction.

    With 8 pairs, the 95% interval of a ratio to slots without noise is the ratio times (1 + noise) ** ±1.09.
    """
    return tuple(rate * (1 + noise) ** (-1 if index % 2 else 1) for index in range(pairs))


def parts(*, step_ms: float, communication: float | None = None, data_wait: float = 0.25) -> StepParts:
    return StepParts(
        held_ms=spread(step_ms),
        compute_ms=step_ms - (communication or 0) - data_wait - 1,
        exposed_communication_ms=communication,
        data_wait_ms=data_wait,
        rest_ms=1,
        ranks=(spread(step_ms),) * (1 if communication is None else 2),
        nodes=("node-1",) * (1 if communication is None else 2),
    )


def finished(
    name: str,
    throughput: Spread,
    *,
    communication: float | None = None,
    data_wait: float = 0.25,
    batch: int = 64,
    start_s: float | None = 6.24,
    **more: object,
) -> Finished:
    step_ms = 1000 * batch / throughput.median
    result = TrialResult(
        trial=name,
        steps=24,
        epochs=1,
        samples_per_second=throughput,
        step_ms=spread(step_ms),
        parts=parts(step_ms=step_ms, communication=communication, data_wait=data_wait),
        **{"peak_memory_mb": (410.0, 402.5), "gradient_mb": 2.8, **more},
    )
    return Finished(time=0.0, trial=name, result=result, time_to_first_step_s=start_s)


BASELINE = trial("baseline", "baseline")
ALL_CORES = trial("reference", "reference", cpus=2)
MAIN = trial("main", "main", strategy="ddp", workers=2)


def rows() -> list[Row]:
    """A baseline at 100 samples/s, one process with both cores at 180, and ddp, 2 workers at 190, measured in turn."""
    main = {"communication": 21.5, "metrics": {"validation/accuracy": 0.97345}}
    ends = [
        finished("main", spread(190, noise=2), slots=in_turn(190, noise=0.02), **main),
        finished("reference", spread(180, noise=9), slots=in_turn(180, noise=-0.06)),
        finished("baseline", spread(100, noise=5), slots=in_turn(100)),
    ]
    return measure_rows([MAIN, BASELINE, ALL_CORES], ends)


LOSSES = (2.3, 2.1, 1.9, 1.7)
DDP_2 = trial("ddp-2", "cell", strategy="ddp", workers=2)
LARGER = trial("ddp-2-batch-64", "cell", strategy="ddp", workers=2, batch=128).model_copy(
    update={"variant": "batch 64"}
)
