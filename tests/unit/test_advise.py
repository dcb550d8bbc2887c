"""Each rule of advice where it is true and where it must stay silent; the list as a whole."""

# promise: the speedup is the ratio of measured throughputs, with its interval; each advice has a measured reason

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import samples
import yaml
from samples import ALL_CORES, BASELINE, DDP_2, HARDWARE, LARGER, MAIN, in_turn, spread

from pipeline.experiment.load import apply_overrides
from pipeline.experiment.schema import Experiment
from pipeline.protocol.estimates import spread as values
from pipeline.protocol.events import Finished
from pipeline.protocol.trial import Trial
from pipeline.report.advice import MOST, advise
from pipeline.report.advice.rules import Case, Finding, exchange_gbit, format_overrides
from pipeline.report.numbers.row import Advice
from pipeline.report.report import Report

CUDA_2 = samples.trial("main", "main", strategy="ddp", workers=2, gpus=1)
SPREAD_OUT = ("node-1", "node-2")


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
    communication: float | None = None,
    data_wait: float = 0.0,
    ranks: Sequence[float] = (),
    nodes: Sequence[str] = (),
    compute: float | None = None,
    **more: object,
) -> Finished:
    """A measurement in slots at ``rate`` samples/s, with that relative noise; all else is as quick as can be."""
    batch = trial.experiment.train.global_batch_size
    slots = in_turn(rate, noise=noise)
    end = samples.finished(trial.name, spread(rate), batch=batch, data_wait=data_wait, slots=slots)
    own = {
        "exposed_communication_ms": communication if trial.workers > 1 else None,
        "ranks": tuple(values([pace] * 5, keeps_values=True) for pace in ranks)
        or (spread(1000 * batch / rate),) * trial.workers,
        "nodes": tuple(nodes) or ("node-1",) * trial.workers,
        "compute_ms": end.result.step_ms.median - (communication or 0) - data_wait - 1 if compute is None else compute,
    }
    parts = end.result.parts.model_copy(update=own)
    return end.model_copy(update={"result": end.result.model_copy(update={"steps": 100, **more, "parts": parts})})


def advised(
    *ends: tuple[Trial, Finished], declared: Experiment | None = None, cores: int | None = 2
) -> tuple[Advice, ...]:
    report = Report.of([trial for trial, _ in ends], [end for _, end in ends], hardware=HARDWARE)
    return advise(report, experiment=declared or experiment(), cores=cores)


def run(*, trial: Trial = MAIN, declared: Experiment | None = None, cores: int | None = 2, **main: Any) -> list[Advice]:
    """Advice for a run of ddp, 2 workers that is nearly twice as fast as its baseline."""
    baseline = samples.trial("baseline", "baseline", gpus=trial.devices_per_worker)
    ends = [(baseline, measured(baseline, 100)), (trial, measured(trial, **{"rate": 190, **main}))]
    return list(advised(*ends, declared=declared, cores=cores))


def about(key: str, advice: Sequence[Advice]) -> list[Advice]:
    return [one for one in advice if key in one.change or key == one.key]


# The list


def test_a_good_run_needs_no_advice() -> None:
    assert run(communication=5) == []


def test_a_run_without_baseline_is_advised_too() -> None:
    (one,) = advised((MAIN, measured(MAIN, 190, data_wait=100)))
    assert one.key == "loader.num_workers"


def everything_wrong() -> list[Advice]:
    declared = experiment(
        parallel__options={"find_unused_parameters": True}, parallel__cpus_per_worker=1,
        train__lr_scaling={"base_batch_size": 32},
    )  # fmt: skip
    return run(
        trial=SEARCHING, declared=declared, communication=110, data_wait=150, gradient_mb=100, ranks=(90, 900),
        nodes=SPREAD_OUT, cores=8,
    )  # fmt: skip


def test_at_most_five_the_most_valuable_first() -> None:
    """Of steps of 337 ms a rank loses 810, data 150, idle cores about 100, a hook and the batch half of 110."""
    advice = everything_wrong()
    assert len(advice) == MOST == 5
    assert "rank 1" in advice[0].reason
    assert [one.key for one in advice[1:]] == [
        "loader.num_workers", "parallel.cpus_per_worker", "parallel.options.communication_hook",
        "train.global_batch_size",
    ]  # fmt: skip


def test_the_list_writes_each_key_once() -> None:
    changes = " ".join(one.change for one in everything_wrong())
    assert changes.count("train.lr_scaling.rule=") == changes.count("train.global_batch_size=") == 1


@pytest.mark.parametrize(
    "values",
    [
        {"train.global_batch_size": 128, "train.lr_scaling": {"rule": "sqrt", "base_batch_size": 64}},
        {"parallel.options": {}, "parallel.strategy": "single"},
        {"parallel.options.static_graph": True},
    ],
)
def test_what_to_paste_are_overrides(values: Mapping[str, Any]) -> None:
    tree = experiment().model_dump(exclude_unset=True)
    assert not apply_overrides(shlex.split(format_overrides(values)), tree, {})
    Experiment.model_validate(tree)


def test_advice_reads_as_reason_and_change() -> None:
    finding = Finding(reason="it is slow", values={"loader.num_workers": 2}, change="or wait", is_measured=True)
    assert finding.advice == Advice(
        reason="it is slow",
        change="or wait; set loader.num_workers=2",
        key="loader.num_workers",
        overrides="loader.num_workers=2",
    )


def test_what_was_not_measured_is_a_question() -> None:
    finding = Finding(reason="it is slow", values={"loader.num_workers": 2})
    assert finding.advice == Advice(
        reason="it is slow",
        change="try loader.num_workers=2",
        key="loader.num_workers",
        overrides="loader.num_workers=2",
        measured=False,
    )
    advice = everything_wrong()
    assert [one.measured for one in advice] == [True, False, False, False, False]
    assert all("set " not in one.change for one in advice[1:])


# Strategy and workers


def tiny(*, single: float, noise: float = 0.0) -> tuple[Advice, ...]:
    """A model whose steps compute 1 ms and exchange 8."""
    return advised(
        (BASELINE, measured(BASELINE, single / 1.5)),
        (ALL_CORES, measured(ALL_CORES, single, noise=noise)),
        (MAIN, measured(MAIN, 6_400, communication=8.0, compute=1.0)),
    )


def test_one_process_with_all_cores_is_faster() -> None:
    (one,) = tiny(single=30_000)
    assert one.reason == (
        "1 process, both cores: 4.69x as fast as 2 workers (ddp) (30,000 and 6,400 samples/s). With 2 workers, 8 ms "
        "of each 10 ms step are exposed communication; this model is too small to hide it"
    )
    assert (one.use, one.measured) == ("1 process on both cores", True)
    assert one.change == "set parallel.strategy=single parallel.workers=1 parallel.cpus_per_worker=2"
    assert one.key == "parallel.strategy"


def test_a_faster_row_in_micro_batches_is_advised_with_them() -> None:
    ends = (BASELINE, measured(BASELINE, 200, micro_batches=2)), (MAIN, measured(MAIN, 100))
    (one,) = about("parallel.strategy", advised(*ends))
    assert one.change == "set parallel.strategy=single parallel.workers=1 train.gradient_accumulation=2"


@pytest.mark.parametrize(("single", "noise"), [(5_000, 0.0), (6_600, 0.0), (8_000, 0.25)])
def test_one_process_is_slower_or_not_clearly_faster(single: float, noise: float) -> None:
    assert not about("parallel.strategy", tiny(single=single, noise=noise))


def test_more_workers_that_bring_nothing() -> None:
    """In the time of one core, two do hardly more."""
    (one, *_) = about("parallel.strategy", run(rate=102))
    assert "with 1 core instead of 2 cores" in one.reason
    assert (one.change, one.measured) == ("set parallel.strategy=single parallel.workers=1", True)
    assert one.reason.startswith("2 workers (ddp): not faster than 1 worker beyond the noise (100 and 102 samples/s)")


def test_of_a_speedup_that_may_be_anything_no_smaller_row_is_advised() -> None:
    assert not about("parallel.strategy", run(rate=102, noise=1.5))


@pytest.mark.parametrize(("noise", "has_pairs"), [(40.0, True), (0.0, False)])
def test_what_may_be_noise_is_not_advised(noise: float, has_pairs: bool) -> None:
    """A ratio of 55 from slots that differ as much says nothing; of what was not measured in turn nobody knows."""
    end = measured(DDP_2, 5_500, noise=noise)
    if not has_pairs:
        end = end.model_copy(update={"result": end.result.model_copy(update={"slots": ()})})
    advice = advised((BASELINE, measured(BASELINE, 100)), (DDP_2, end), declared=SINGLE)
    assert not any(one.measured for one in advice)


def test_what_is_beyond_the_noise_is_advised() -> None:
    advice = advised((BASELINE, measured(BASELINE, 100)), (DDP_2, measured(DDP_2, 5_500, noise=2.0)), declared=SINGLE)
    assert [one.measured for one in about("parallel.strategy", advice)] == [True]


def comparison(*, dp: float, ddp: float, losses: Sequence[float] = (2.0,) * 5) -> tuple[Advice, ...]:
    """dp on 2 GPUs, which is declared, against ddp on 2."""
    baseline = samples.trial("baseline", "baseline", gpus=1)
    one = samples.trial("dp-1", "cell", strategy="dp", gpus=2)
    two = samples.trial("ddp-2", "cell", strategy="ddp", workers=2, gpus=1)
    return advised(
        (baseline, measured(baseline, 100, losses=(2.0,) * 5)),
        (one, measured(one, dp, losses=(2.0,) * 5)),
        (two, measured(two, ddp, communication=1.0, losses=tuple(losses))),
        declared=experiment(parallel__strategy="dp", parallel__workers=1),
    )


def test_ddp_is_faster_than_dp_on_the_same_gpus() -> None:
    (one,) = comparison(dp=150, ddp=190)
    assert "2 workers (ddp): 1.27x as fast as 1 process on 2 GPUs (dp)" in one.reason
    assert one.change == "set parallel.strategy=ddp parallel.workers=2"


def test_dp_that_is_as_fast_stays() -> None:
    assert comparison(dp=190, ddp=192) == ()


def test_speed_that_trains_something_else_is_no_reason() -> None:
    assert comparison(dp=150, ddp=190, losses=(2.0, 3.0, 4.0, 5.0, 6.0)) == ()


def test_options_that_the_better_strategy_doesn_t_know_are_removed() -> None:
    declared = experiment(parallel__options={"static_graph": True})
    trial = MAIN.model_copy(update={"options": {"static_graph": True}})
    (one, *_) = run(rate=50, trial=trial, declared=declared)
    assert "'parallel.options={}'" in one.overrides


def test_what_else_is_said_is_about_the_better_row() -> None:
    """With one process there is nothing to exchange: no advice on that."""
    advice = run(rate=50, communication=900)
    assert [one.key for one in advice] == ["parallel.strategy"]


def test_a_slow_link_that_a_hook_can_mend_is_no_reason_to_leave() -> None:
    """At 853 ms a step, 600 of them for 100 MB over 1.4 Gbit/s, fp16 would leave 553: faster than single."""
    slow = {"rate": 75, "communication": 600, "nodes": SPREAD_OUT, "gradient_mb": 100}
    advice = run(**slow)
    assert about("communication_hook=fp16", advice)
    assert not about("parallel.strategy", advice)


def test_a_hook_that_can_t_mend_it_is_not_advised() -> None:
    advice = run(rate=10, communication=2_000, nodes=SPREAD_OUT, gradient_mb=100)
    assert [one.key for one in advice] == ["parallel.strategy"]


def test_a_straggler_is_no_reason_to_leave() -> None:
    advice = run(rate=80, ranks=(300, 790))
    assert ["rank 1" in one.reason for one in advice] == [True]


# Exchange


def test_much_exchange_wants_larger_batches() -> None:
    (one,) = run(communication=100)  # of 337 ms
    assert one.reason == "2 workers (ddp): 100 ms of each 337 ms step are exposed communication"
    assert one.change.endswith(
        "; try train.global_batch_size=128 train.lr_scaling.rule=linear train.lr_scaling.base_batch_size=64"
    )


@pytest.mark.parametrize(
    ("keys", "written_there", "not_there"),
    [
        ({"train__gradient_accumulation": 2}, "train.gradient_accumulation=4", "num_workers"),
        ({"train__lr_scaling": {"rule": "sqrt"}}, "train.global_batch_size=128", "lr_scaling"),
        (
            {"optimizer": {"_target_": "torch.optim.AdamW"}},
            "train.lr_scaling.rule=sqrt train.lr_scaling.base_batch_size=64",
            "linear",
        ),
        ({}, "train.global_batch_size=128", "gradient_accumulation"),
    ],
)
def test_larger_batches_fit_the_file(keys: dict[str, Any], written_there: str, not_there: str) -> None:
    (one,) = run(communication=100, declared=experiment(**keys))
    assert written_there in one.change
    assert not_there not in one.change


@pytest.mark.parametrize("why", ["little", "noise", "too few samples"])
def test_no_larger_batches(why: str) -> None:
    more: dict[str, Any] = {"little": {"communication": 60}, "too few samples": {"steps": 2}}.get(why, {})
    advice = run(**{"communication": 100, **more}) if why != "noise" else run_noisy(communication=100)
    assert not about("train.global_batch_size", advice)


def run_noisy(*, noise: float = 150, **main: Any) -> tuple[Advice, ...]:
    """Steps of 337 ms, some of them that much longer or shorter."""
    end = measured(MAIN, 190, **main)
    parts = end.result.parts
    noisy = parts.model_copy(update={"held_ms": spread(end.result.step_ms.median, noise=noise)})
    return advised((MAIN, end.model_copy(update={"result": end.result.model_copy(update={"parts": noisy})})))


@pytest.mark.parametrize(
    ("trial", "gradient_mb", "keys", "hook"),
    [
        (CUDA_2, 100, {}, "bf16"),  # 100 MB in 100 ms: 8.4 Gbit/s
        (CUDA_2, 10, {}, "bf16"),
        (CUDA_2, 10, {"train__precision": "fp16"}, "bf16"),
        (MAIN, 100, {}, "fp16"),
        (MAIN, 10, {}, "fp16"),
    ],
)
def test_a_slow_link_wants_fewer_bits(trial: Trial, gradient_mb: float, keys: dict[str, Any], hook: str) -> None:
    declared = experiment(**keys)
    advice = run(trial=trial, communication=100, gradient_mb=gradient_mb, nodes=SPREAD_OUT, declared=declared)
    (one,) = about("communication_hook", advice)
    assert f"parallel.options.communication_hook={hook}" in one.change
    assert f"{gradient_mb} MiB at about {0.0839 * gradient_mb:.3g} Gbit/s" in one.reason


@pytest.mark.parametrize(
    "more",
    [
        {"gradient_mb": 200},  # 16.8 Gbit/s: not slow
        {"communication": 80},  # less than a quarter
        {"gradient_mb": 0.5},  # latency
        {"nodes": ("node-1", "node-1")},  # no link
        {"declared": experiment(train__precision="fp64")},
        {"trial": MAIN.model_copy(update={"options": {"communication_hook": "fp16"}})},
    ],
)
def test_no_hook(more: dict[str, Any]) -> None:
    assert not about(
        "communication_hook", run(**{"communication": 100, "gradient_mb": 10, "nodes": SPREAD_OUT, **more})
    )


def test_bandwidth_is_that_of_a_ring() -> None:
    """2 workers send all gradients once, 4 workers one and a half times."""
    trial = samples.trial("main", "main", strategy="ddp", workers=4)
    report = Report.of([trial], [measured(trial, 100, communication=100, gradient_mb=100)], hardware=HARDWARE)
    assert exchange_gbit(report.main) == pytest.approx(1.5 * 100 * 2**20 * 8 / 0.1 / 1e9)


SEARCHING = MAIN.model_copy(update={"options": {"find_unused_parameters": True}})


@pytest.mark.parametrize(
    ("unused", "overrides"),
    [
        (0, "parallel.options.find_unused_parameters=false"),
        (3, "parallel.options.find_unused_parameters=false parallel.options.static_graph=true"),
    ],
)
def test_a_search_for_unused_parameters_that_nobody_needs(unused: int, overrides: str) -> None:
    (one,) = run(trial=SEARCHING, unused_parameters=unused)
    assert one.overrides == overrides


def test_without_the_search_there_is_nothing_to_say() -> None:
    assert run(unused_parameters=3) == []


# Data, cores, learning rate, stragglers


@pytest.mark.parametrize(
    ("now", "wait", "cores", "wanted"),
    [(0, 40, 2, 1), (0, 250, 8, 3), (2, 40, 8, 3), (2, 100, 16, 3), (1, 250, 4, 2)],
)
def test_waiting_for_data_wants_loaders(now: int, wait: float, cores: int, wanted: int) -> None:
    """A step is 337 ms; each rank may have half the cores, and two loaders in any case."""
    declared = experiment(loader__num_workers=now)
    (one,) = run(data_wait=wait, declared=declared, cores=cores)
    assert one.reason == f"2 workers (ddp): {wait} ms of each 337 ms step are data loading"
    assert one.overrides == f"loader.num_workers={wanted}"
    assert ("no core is idle" in one.change) == (2 + 2 * wanted > cores)


def test_loaders_that_can_t_get_more_have_to_get_faster() -> None:
    (one,) = run(data_wait=100, declared=experiment(loader__num_workers=2), cores=4)
    assert one.key == ""
    assert "2 DataLoader workers for 2 cores" in one.change


def test_little_waiting_for_data_is_none() -> None:
    assert run(data_wait=30) == []
    assert not run_noisy(data_wait=100)


def test_a_wait_that_is_most_of_the_step_is_no_noise() -> None:
    (one,) = run_noisy(noise=300, data_wait=200)
    assert one.key == "loader.num_workers"


def test_idle_cores_want_threads() -> None:
    (one,) = run(declared=experiment(parallel__cpus_per_worker=1), cores=8)
    assert one.reason == "2 workers (ddp): 2 of 8 cores are used"
    assert one.change == "try parallel.cpus_per_worker=4"


def test_a_batch_or_an_option_that_was_measured_is_no_suggestion() -> None:
    """A cell has measured the batch of 128, another one the hook."""
    slow = {"communication": 100, "gradient_mb": 10, "nodes": SPREAD_OUT}
    hooked = DDP_2.model_copy(update={"name": "hooked", "options": {"communication_hook": "fp16"}})
    ends = [(BASELINE, measured(BASELINE, 100)), (DDP_2, measured(DDP_2, 190, **slow))]
    asked = [one.overrides for one in advised(*ends)]
    assert asked[0] == "parallel.options.communication_hook=fp16"
    assert asked[1].startswith("train.global_batch_size=128 ")
    assert advised(*ends, (LARGER, measured(LARGER, 180, **slow)), (hooked, measured(hooked, 190))) == ()


def test_more_cores_that_were_measured_need_no_question() -> None:
    """One process on both cores was no faster than on one."""
    baseline, more = measured(BASELINE, 100), measured(ALL_CORES, 100)
    declared = experiment(parallel__strategy="single", parallel__workers=1, parallel__cpus_per_worker=1)
    one = samples.trial("main", "main")
    ends = [(BASELINE, baseline), (one, measured(one, 100))]
    assert [each.key for each in advised(*ends, declared=declared, cores=2)] == ["parallel.cpus_per_worker"]
    assert advised(*ends, (ALL_CORES, more), declared=declared, cores=2) == ()


def test_cores_on_each_of_two_nodes() -> None:
    (one,) = run(declared=experiment(parallel__cpus_per_worker=1), cores=8, nodes=SPREAD_OUT)
    assert one.change == "try parallel.cpus_per_worker=8"


@pytest.mark.parametrize(
    "more",
    [
        {"cores": 2},
        {"cores": None},
        {"cores": 8, "declared": experiment()},  # the plan gives them all anyway
        {"cores": 4, "declared": experiment(parallel__cpus_per_worker=1, loader__num_workers=1)},  # loaders have them
        {"cores": 8, "trial": CUDA_2},
    ],
)
def test_no_idle_cores(more: dict[str, Any]) -> None:
    assert run(**{"declared": experiment(parallel__cpus_per_worker=1), **more}) == []


def test_larger_global_batches_want_another_learning_rate() -> None:
    (other,) = run(declared=experiment(train__lr_scaling={"base_batch_size": 32}))
    assert other.reason == "The global batch size is 64, but the learning rate was chosen for 32"
    assert other.change == ("try train.lr_scaling.rule=linear train.lr_scaling.base_batch_size=32")


def test_a_learning_rate_that_follows_or_has_no_reason_to() -> None:
    assert run(declared=experiment(train__lr_scaling={"rule": "linear", "base_batch_size": 32})) == []
    assert run(declared=experiment(train__lr_scaling={"base_batch_size": 64})) == []


SINGLE = experiment(parallel__strategy="single", parallel__workers=1)


def test_a_straggler_is_named() -> None:
    (one,) = run(ranks=(200, 300), nodes=SPREAD_OUT)
    assert (
        one.reason == "rank 1 on node-2 takes 300 ms per step without waiting for other ranks, the other ranks 200 ms"
    )
    assert one.key == ""


def test_one_of_many_is_named() -> None:
    trial = samples.trial("main", "main", strategy="ddp", workers=4)
    nodes = ("node-1", "node-1", "node-2", "node-2")
    (one,) = advised((trial, measured(trial, 100, ranks=(200, 201, 400, 202), nodes=nodes)))
    assert one.reason.startswith("rank 2 on node-2 takes 400 ms")


def test_ranks_that_are_nearly_equal_are_no_stragglers() -> None:
    assert run(ranks=(200, 240)) == []
    assert not run_noisy(ranks=(200, 300))


def test_a_rank_with_more_samples_is_no_straggler() -> None:
    """Of 3 samples, rank 0 has 2."""
    trial = samples.trial("main", "main", strategy="ddp", workers=2, batch=3)
    assert advised((trial, measured(trial, 10, ranks=(240, 130)))) == ()


def test_a_case_counts_workers_by_node() -> None:
    trial = samples.trial("main", "main", strategy="ddp", workers=3, cpus=2)
    report = Report.of([trial], [measured(trial, 10, nodes=("a", "a", "b"))], hardware=HARDWARE)
    case = Case(row=report.main, experiment=experiment(), cores=4)
    assert (case.workers_per_node, case.cores_per_worker) == (2, 2)


# Precision


@pytest.mark.parametrize(
    ("has_tf32", "keys", "used", "is_given"),
    [
        (True, {}, "highest", True),
        (True, {}, "high", False),
        (True, {"train__precision": "bf16"}, "highest", False),
        (False, {}, "highest", False),
    ],
)
def test_fp32_beside_idle_tensor_cores(has_tf32: bool, keys: dict[str, Any], used: str, is_given: bool) -> None:
    gpus = {"gpus": ("NVIDIA A100-SXM4-40GB",) * 2, "has_tf32": has_tf32}
    advice = run(trial=CUDA_2, declared=experiment(**keys), **gpus, matmul_precision=used)
    found = about("train.matmul_precision", advice)
    assert [one.overrides for one in found] == (["train.matmul_precision=high"] if is_given else [])
    for one in found:
        assert one.reason == "NVIDIA A100-SXM4-40GB has tensor cores for TF32, but computes matrix products in fp32"
        assert not one.measured
