"""Each recommendation where it is true and where it must stay silent."""

# promise: the speedup is the ratio of measured throughputs, with its interval; each advice has a measured reason

import shlex
from collections.abc import Sequence
from typing import Any

import pytest
import samples
import yaml
from samples import ALL_CORES, BASELINE, DDP_2, LARGER, MAIN, in_turn, spread

from pipeline.experiment.load import apply_overrides
from pipeline.experiment.schema import Experiment
from pipeline.protocol.estimates import spread as values
from pipeline.protocol.events import Finished
from pipeline.protocol.trial import Trial
from pipeline.results.advice import advise
from pipeline.results.record import Advice
from pipeline.results.speedup import measure_rows

CUDA_2 = samples.trial("main", "main", strategy="ddp", workers=2, gpus=1)
FOUR = samples.trial("main", "main", strategy="ddp", workers=4)
HOOKED = MAIN.model_copy(update={"options": {"communication_hook": "fp16"}})
SPREAD_OUT = ("node-1", "node-2")
BATCH = ("train.global_batch_size=128", "train.lr_scaling.rule=linear", "train.lr_scaling.base_batch_size=64")
FP16, BF16 = ("parallel.options.communication_hook=fp16",), ("parallel.options.communication_hook=bf16",)
SINGLE = ("parallel.strategy=single", "parallel.workers=1", "parallel.cpus_per_worker=1")


def experiment(**keys: Any) -> Experiment:
    """The one of `samples`, declaring ddp, 2 workers, with dotted keys (``train__precision``) set."""
    tree = MAIN.experiment.model_dump(exclude_unset=True)
    overrides = {"parallel.strategy": "ddp", "parallel.workers": 2, "parallel.launcher": "torchrun"}
    overrides |= {key.replace("__", "."): value for key, value in keys.items()}
    written_as = [f"{key}={yaml.safe_dump(value, default_flow_style=True).strip()}" for key, value in overrides.items()]
    assert not apply_overrides(written_as, tree, {})
    return Experiment.model_validate(tree)


def measured(
    trial: Trial,
    rate: float,
    *,
    noise: float = 0.0,
    step_noise: float = 0.0,
    communication: float | None = None,
    data_wait: float = 0.0,
    ranks: Sequence[float] = (),
    nodes: Sequence[str] = (),
    compute: float | None = None,
    **more: object,
) -> Finished:
    """A measurement in slots at ``rate`` samples/s, with that relative noise; all else is as quick as can be."""
    batch = trial.experiment.train.global_batch_size
    end = samples.finished(trial.name, spread(rate), batch=batch, data_wait=data_wait, slots=in_turn(rate, noise=noise))
    step_ms = end.result.step_ms.median
    own = {
        "exposed_communication_ms": communication if trial.workers > 1 else None,
        "ranks": tuple(values([pace] * 5, keeps_values=True) for pace in ranks) or (spread(step_ms),) * trial.workers,
        "nodes": tuple(nodes) or ("node-1",) * trial.workers,
        "compute_ms": step_ms - (communication or 0) - data_wait - 1 if compute is None else compute,
        "held_ms": spread(step_ms, noise=step_noise),
    }
    parts = end.result.parts.model_copy(update=own)
    return end.model_copy(update={"result": end.result.model_copy(update={"steps": 100, **more, "parts": parts})})


def advised(
    *ends: tuple[Trial, Finished], own: str = "main", declared: Experiment | None = None, cores: int | None = 2
) -> tuple[Advice, ...]:
    rows = measure_rows([trial for trial, _ in ends], [end for _, end in ends])
    (main,) = (row for row in rows if row.key == own)
    return advise(rows, main, experiment=declared or experiment(), cores=cores)


def run(*, trial: Trial = MAIN, declared: Experiment | None = None, cores: int | None = 2, **main: Any) -> list[Advice]:
    """Advice for a run of ddp, 2 workers that is nearly twice as fast as its baseline."""
    baseline = samples.trial("baseline", "baseline", gpus=trial.devices_per_worker)
    ends = [(baseline, measured(baseline, 100)), (trial, measured(trial, **{"rate": 190, **main}))]
    return list(advised(*ends, declared=declared, cores=cores))


LINK = {"communication": 100, "gradient_mb": 10, "nodes": SPREAD_OUT}
"""Of each 337 ms step, 100 are exposed communication, over a slow link."""


@pytest.mark.parametrize(
    ("measures", "expected"),
    [
        ({"communication": 5}, []),  # a good run
        # another row
        ({"rate": 50}, [SINGLE]),
        ({"rate": 102}, [SINGLE]),  # more workers that bring nothing
        ({"rate": 102, "noise": 1.5}, []),  # a speedup that may be anything
        ({"rate": 50, "communication": 900}, [SINGLE]),  # with one process there is nothing to synchronize
        ({"rate": 10, "communication": 2_000, "nodes": SPREAD_OUT, "gradient_mb": 100}, [SINGLE]),
        ({"rate": 75, "communication": 600, "nodes": SPREAD_OUT, "gradient_mb": 100}, [FP16, BATCH]),  # a hook mends it
        ({"rate": 80, "ranks": (300, 790)}, [()]),  # a straggler is no reason to leave
        # a larger batch
        ({"communication": 100}, [BATCH]),
        ({"communication": 60}, []),
        ({"communication": 100, "steps": 2}, []),
        ({"communication": 100, "step_noise": 150}, []),
        ({"communication": 100, "declared": experiment(train__gradient_accumulation=2)},
         [(BATCH[0], "train.gradient_accumulation=4", *BATCH[1:])]),
        ({"communication": 100, "declared": experiment(train__lr_scaling={"rule": "sqrt"})}, [BATCH[:1]]),
        ({"communication": 100, "declared": experiment(optimizer={"_target_": "torch.optim.AdamW"})},
         [(BATCH[0], "train.lr_scaling.rule=sqrt", BATCH[2])]),
        # a slow link
        (LINK, [FP16, BATCH]),
        ({**LINK, "trial": CUDA_2}, [BF16, BATCH]),
        ({**LINK, "ranks": (200, 300)}, [(), FP16, BATCH]),  # a straggler comes first
        ({**LINK, "gradient_mb": 200}, [BATCH]),  # 16.8 Gbit/s: not slow
        ({**LINK, "communication": 80}, [BATCH]),  # less than a quarter
        ({**LINK, "gradient_mb": 0.5}, [BATCH]),  # latency
        ({**LINK, "nodes": ("node-1", "node-1")}, [BATCH]),  # no link
        ({**LINK, "declared": experiment(train__precision="fp64")}, [BATCH]),
        ({**LINK, "trial": HOOKED}, [BATCH]),
        # data
        ({"data_wait": 40}, [("loader.num_workers=1",)]),
        ({"data_wait": 250, "cores": 8}, [("loader.num_workers=3",)]),
        ({"data_wait": 100, "cores": 16, "declared": experiment(loader__num_workers=2)}, [("loader.num_workers=3",)]),
        ({"data_wait": 100, "cores": 4, "declared": experiment(loader__num_workers=2)}, [()]),  # no more cores
        ({"data_wait": 30}, []),
        ({"data_wait": 100, "step_noise": 150}, []),
        ({"data_wait": 200, "step_noise": 300}, [("loader.num_workers=2",)]),  # most of the step is no noise
        # a straggler
        ({"ranks": (200, 300), "nodes": SPREAD_OUT}, [()]),
        ({"ranks": (200, 240)}, []),
        ({"ranks": (200, 300), "step_noise": 150}, []),
    ],
)  # fmt: skip
def test_a_run_is_advised(measures: dict[str, Any], expected: list[tuple[str, ...]]) -> None:
    assert [one.overrides for one in run(**measures)] == expected


@pytest.mark.parametrize(
    ("measures", "reason", "change"),
    [
        ({"ranks": (200, 300), "nodes": SPREAD_OUT},
         "It takes 300.0 ms per step without waiting for other ranks, the other ranks 200.0 ms.",
         "Find out what slows rank 1 on node-2 down; all ranks wait for the slowest one."),
        (
            LINK,
            "100.0 ms of each 336.8 ms step with 2 workers are exposed communication, for 10 MiB at about 0.84 Gbit/s. "
            "Not measured.",
            "Gradients lose precision; check that the model trains as well.",
        ),
        (
            {"trial": FOUR, "communication": 170, "gradient_mb": 100, "nodes": SPREAD_OUT * 2},
            "170.0 ms of each 336.8 ms step with 4 workers are exposed communication, for 100 MiB at about 7.4 Gbit/s. "
            "Not measured.",  # a ring of 4 sends all gradients one and a half times
            "Gradients lose precision; check that the model trains as well.",
        ),
        ({"data_wait": 100, "cores": 4, "declared": experiment(loader__num_workers=2)},
         "100.0 ms of each 336.8 ms step with 2 workers are data loading.",
         "Speed up __getitem__: 2 DataLoader workers for 2 cores are too slow."),
        ({"data_wait": 40}, "40.0 ms of each 336.8 ms step with 2 workers are data loading. Not measured.",
         "No core is idle, so DataLoader workers help only if loading waits for storage."),
    ],
)  # fmt: skip
def test_a_suggestion_has_its_measurement(measures: dict[str, Any], reason: str, change: str) -> None:
    first = run(**measures)[0]
    assert (first.reason, first.change, first.use) == (reason, change, "")


def test_a_rank_with_more_samples_is_no_straggler() -> None:
    """Of 3 samples, rank 0 has 2."""
    trial = samples.trial("main", "main", strategy="ddp", workers=2, batch=3)
    assert advised((trial, measured(trial, 10, ranks=(240, 130)))) == ()


def tiny(*, single: float, noise: float = 0.0) -> tuple[Advice, ...]:
    """A model whose steps compute 1 ms and synchronize 8."""
    return advised(
        (BASELINE, measured(BASELINE, single / 1.5)),
        (ALL_CORES, measured(ALL_CORES, single, noise=noise)),
        (MAIN, measured(MAIN, 6_400, communication=8.0, compute=1.0)),
    )


def test_one_process_with_all_cores_is_advised_where_it_is_clearly_faster() -> None:
    (one,) = tiny(single=30_000)
    assert one.reason.startswith("1 process on both cores is 4.69x as fast as 2 workers (95% CI 4.69x to 4.69x).")
    assert one.use == "1 process on both cores"
    assert one.overrides == (*SINGLE[:2], "parallel.cpus_per_worker=2")
    for single, noise in ((5_000, 0.0), (6_600, 0.0), (8_000, 0.25)):
        assert not any(one.use for one in tiny(single=single, noise=noise))


def test_a_faster_row_has_its_micro_batches_and_no_options_that_it_does_not_know() -> None:
    ends = (BASELINE, measured(BASELINE, 200, micro_batches=2)), (MAIN, measured(MAIN, 100))
    assert advised(*ends)[0].overrides == (*SINGLE, "train.gradient_accumulation=2")
    trial = MAIN.model_copy(update={"options": {"static_graph": True}})
    (one,) = run(rate=50, trial=trial, declared=experiment(parallel__options={"static_graph": True}))
    assert "'parallel.options={}'" in one.overrides
    assert shlex.split(" ".join(one.overrides)) == [*SINGLE[:2], "parallel.options={}", *SINGLE[2:]]


def configurations(*, dp: float, ddp: float, losses: Sequence[float] = (2.0,) * 5, **more: Any) -> tuple[Advice, ...]:
    """dp on 2 GPUs, which is declared, against ddp on 2."""
    baseline = samples.trial("baseline", "baseline", gpus=1)
    one = samples.trial("dp-1", "cell", strategy="dp", gpus=2)
    two = samples.trial("ddp-2", "cell", strategy="ddp", workers=2, gpus=1).model_copy(update=more)
    return advised(
        (baseline, measured(baseline, 100, losses=(2.0,) * 5)),
        (one, measured(one, dp, losses=(2.0,) * 5)),
        (two, measured(two, ddp, communication=1.0, losses=tuple(losses))),
        own="dp-1",
        declared=experiment(parallel__strategy="dp", parallel__workers=1),
    )


def test_a_configuration_of_a_benchmark_is_advised_with_its_overrides() -> None:
    (one,) = configurations(dp=150, ddp=190, overrides=("parallel.strategy=ddp", "loader.num_workers=2"))
    assert one.reason == "2 workers are 1.27x as fast as 1 process on 2 GPUs (95% CI 1.27x to 1.27x)."
    assert one.overrides == ("parallel.strategy=ddp", "loader.num_workers=2")
    assert configurations(dp=190, ddp=192) == ()
    assert configurations(dp=150, ddp=190, losses=(2.0, 3.0, 4.0, 5.0, 6.0)) == ()  # it trains something else


def test_a_batch_or_a_hook_that_was_measured_is_no_suggestion() -> None:
    hooked = DDP_2.model_copy(update={"name": "hooked", "options": {"communication_hook": "fp16"}})
    slow = {"communication": 100, "gradient_mb": 10, "nodes": SPREAD_OUT}
    ends = [(BASELINE, measured(BASELINE, 100)), (DDP_2, measured(DDP_2, 190, **slow))]
    assert [one.overrides for one in advised(*ends, own="ddp-2")] == [FP16, BATCH]
    ends += [(LARGER, measured(LARGER, 180, **slow)), (hooked, measured(hooked, 190))]
    assert advised(*ends, own="ddp-2") == ()


@pytest.mark.parametrize(("noise", "has_pairs"), [(40.0, True), (0.0, False)])
def test_what_may_be_noise_is_not_advised(noise: float, has_pairs: bool) -> None:
    """A ratio of 55 from slots that differ as much says nothing; of what was not measured in turn nobody knows."""
    end = measured(DDP_2, 5_500, noise=noise)
    if not has_pairs:
        end = end.model_copy(update={"result": end.result.model_copy(update={"slots": ()})})
    assert advised((BASELINE, measured(BASELINE, 100)), (DDP_2, end), own="baseline") == ()
    end = measured(DDP_2, 5_500, noise=2.0)
    assert advised((BASELINE, measured(BASELINE, 100)), (DDP_2, end), own="baseline")[0].use == "2 workers"
