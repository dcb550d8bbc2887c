"""Speedup, efficiency and what is said of them against figures worked out by hand."""

# promise: the speedup is the ratio of measured throughputs, with its interval; each advice has a measured reason

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean

import pytest
from samples import ALL_CORES, BASELINE, HARDWARE, MAIN, finished, in_turn, parts, rows, spread, trial

from pipeline.protocol.estimates import spread as values
from pipeline.protocol.trial import Trial
from pipeline.protocol.trial_result import Flops, Spread
from pipeline.results import record
from pipeline.results.breakdown import find_straggler, parts_table
from pipeline.results.measured import result_of_run
from pipeline.results.record import Fact, Result
from pipeline.results.speedup import Row, iter_facts, measure_rows


def slots(**rates: Sequence[float]) -> list[Row]:
    """Rows of trials that were measured in turn, by name."""
    ends = [finished(name, spread(geometric_mean(each)), slots=each) for name, each in rates.items()]
    return measure_rows([MAIN, BASELINE, ALL_CORES][: len(ends)], ends)


def windows(main: Trial, *, main_at: Spread, baseline_at: Spread, baseline: Trial = BASELINE) -> list[Row]:
    """Rows of a training and a baseline that were measured one after the other."""
    return measure_rows([main, baseline], [finished(main.name, main_at), finished(baseline.name, baseline_at)])


def result(measured: Sequence[Row]) -> Result:
    return result_of_run(measured, hardware=HARDWARE, cores=2)


def fact(made: Result, key: str, trial: str = "main") -> Fact:
    found = made.fact(key, trial)
    assert found is not None
    return found


def test_speedup_of_slots_is_the_geometric_mean_of_their_ratios() -> None:
    """1, 2 and 4 times the baseline, whose pace changes."""
    speedup = fact(made := result(slots(main=(100, 800, 40), baseline=(100, 400, 10))), "speedup")
    assert speedup.value == pytest.approx(2.0)
    assert speedup.low is not None
    assert speedup.high is not None
    assert speedup.low * speedup.high == pytest.approx(4.0)
    assert fact(made, "efficiency").value == pytest.approx(1.0)
    assert fact(made, "speedup_rounds").value == 3


def test_windows_are_a_range_of_medians_that_resolves_nothing() -> None:
    """On a machine whose pace changes, three windows each are no sample of it, however far apart they are."""
    main = trial("main", "main", strategy="ddp", workers=4)
    measured = windows(main, main_at=spread(300, noise=30), baseline_at=spread(100, noise=10))
    made = result(measured)
    speedup, efficiency = (fact(made, key) for key in ("speedup", "efficiency"))
    assert (speedup.value, efficiency.value) == pytest.approx((3.0, 0.75))
    assert (speedup.low, speedup.high, speedup.state, speedup.has_interval) == (None, None, "inconclusive", False)
    assert measured[-1].ratio == pytest.approx((3.0, 270 / 110, 330 / 90, 0))
    assert measured[-1].claim == "inconclusive"
    assert made.verdict == "4 workers (ddp): inconclusive, 3.00x measured without a confidence interval"
    assert made.next == (
        ("REASON", "The baseline was not measured alternately with the training"),
        ("NEXT", "Measure both in rounds:"),
        ("", "pipeline benchmark FILE"),
    )


def test_devices_of_dp_are_its_gpus() -> None:
    ends = [finished("main", spread(200), slots=in_turn(200)), finished("baseline", spread(100), slots=in_turn(100))]
    trials = [trial("main", "main", strategy="dp", gpus=4), trial("baseline", "baseline", gpus=1)]
    main = measure_rows(trials, ends)[-1]
    assert main.ratio is not None
    assert main.efficiency is not None
    assert (main.ratio.value, main.efficiency.value) == pytest.approx((2.0, 0.5))
    assert main.devices == "4 GPUs"


def test_rows_are_baseline_then_references_by_size_then_main() -> None:
    more = [trial(f"ddp-{n}", "reference", strategy="ddp", workers=n) for n in (8, 4)]
    made = measure_rows([MAIN, *more, BASELINE], [finished(t.name, spread(100)) for t in (MAIN, *more, BASELINE)])
    assert [row.key for row in made] == ["baseline", "ddp-4", "ddp-8", "main"]


@pytest.mark.parametrize(
    ("main", "reason"),
    [
        (trial("main", "main", strategy="dp"), "DataParallel has one device here"),
        (trial("main", "main"), "the baseline is the same training"),
    ],
)
def test_what_is_the_baseline_once_more_claims_nothing_however_fast_it_was(main: Trial, reason: str) -> None:
    made = result(windows(main, main_at=spread(190), baseline_at=spread(100)))
    assert (made.fact("speedup"), made.fact("efficiency")) == (None, None)
    assert made.headline[-1].endswith(f"Speedup not measured ({reason})")
    assert made.verdict.endswith("190 samples/s; speedup not measured")


def test_without_a_baseline_there_is_no_speedup() -> None:
    made = result_of_run(
        measure_rows([MAIN, BASELINE], [finished("main", spread(190))]), hardware=HARDWARE, missing="failed"
    )
    assert made.fact("speedup") is None
    assert "Speedup not measured (the measurement failed" in made.headline[-1]


@pytest.mark.parametrize(
    ("rate", "state"),
    [
        (103, "inconclusive"),  # 0.98 to 1.09: on both sides of 1
        (110, "ok"),  # 1.04 to 1.16
        (90, "ok"),  # 0.85 to 0.95: slower, and that is a result too
    ],
)
def test_a_speedup_whose_interval_holds_1_is_inconclusive(rate: float, state: str) -> None:
    made = result(slots(main=in_turn(rate, noise=0.05), baseline=in_turn(100)))
    speedup = fact(made, "speedup")
    assert (speedup.state, made.state, state == "inconclusive") == (state, state, "inconclusive" in made.verdict)
    assert record.mlflow_tags(made)["main"]["speedup"].startswith("inconclusive, ") == (state == "inconclusive")


@pytest.mark.parametrize(("pairs", "is_told"), [(2, True), (4, True), (5, False)])
def test_few_rounds_are_the_reason_of_a_doubt(pairs: int, is_told: bool) -> None:
    rates = in_turn(103, noise=0.3, pairs=pairs)
    ends = [finished("main", spread(103), slots=rates, slots_s=136.0)]
    ends += [finished("baseline", spread(100), slots=in_turn(100, pairs=pairs))]
    made = result(measure_rows([MAIN, BASELINE], ends))
    said = f"Only {pairs} rounds fit into benchmark.time_budget_s (they took 2 min 16 s)"
    assert (dict(made.next)["REASON"] == said) == is_told


@pytest.mark.parametrize(("cores", "is_told"), [(0.1, False), (0.3, True), (None, False)])
def test_what_else_a_machine_did_meanwhile_is_told(cores: float | None, is_told: bool) -> None:
    ends = [finished("main", spread(103), slots=in_turn(103, noise=0.05), other_cores=cores, slots_s=30.0)]
    ends += [finished("baseline", spread(100), slots=in_turn(100))]
    reason = dict(result(measure_rows([MAIN, BASELINE], ends)).next)["REASON"]
    assert (reason == "Other processes used 0.3 CPU cores during the measurement") == is_told


def test_the_time_of_the_whole_training_is_that_of_its_samples_and_its_start() -> None:
    """19,000 samples at 100 and at 190 a second; what ran beside the training has the training's start."""
    ends = [finished("main", spread(190), slots=in_turn(190), start_s=6.24, whole_training=19_000)]
    ends += [finished("baseline", spread(100), slots=in_turn(100), start_s=None, whole_training=19_000)]
    made = result(measure_rows([MAIN, BASELINE], ends))
    times = [fact(made, "estimated_training_s", name).value for name in ("baseline", "main")]
    assert times == pytest.approx([196.24, 106.24])
    assert fact(made, "estimated_device_hours").value == pytest.approx(2 * 106.24 / 3600)
    assert result(rows()).fact("estimated_training_s") is None


def test_a_baseline_in_micro_batches_says_so_wherever_its_row_is_read() -> None:
    """Batch statistics of micro-batches are a reason for another loss, also where workers share them."""
    coupled = {"coupling": ("SyncBatchNorm",), "losses": (2.3, 2.2, 2.1)}
    ends = [finished("main", spread(190), slots=in_turn(190), **coupled)]
    base = {"coupling": ("BatchNorm2d",), "losses": (2.3, 2.1, 1.9), "micro_batches": 2}
    ends += [finished("baseline", spread(100), slots=in_turn(100), **base)]
    made = result(measure_rows([MAIN, BASELINE], ends))
    assert made.tables[0].rows[0][0] == "1 worker (2 micro-batches, baseline)"
    assert made.tables[0].notes == (
        "[1] Loss differs from the baseline's by up to 0.11 in the first 3 steps: the baseline computes the "
        "statistics of each of its 2 micro-batches.",
    )
    assert any(
        note.startswith("1 worker (2 micro-batches): 64 samples at once did not fit into memory") for note in made.notes
    )


@pytest.mark.parametrize(("operations", "state"), [("tf32", "same"), ("fp32", "differs")])
def test_losses_may_differ_by_the_rounding_of_tf32_where_it_was_used(operations: str, state: str) -> None:
    """The operations that were counted show it, whatever the GPU is able to do."""
    flops = Flops(of_sample={operations: 1e6})
    ends = [finished("main", spread(190), losses=(2.3, 2.31), flops=flops, has_tf32=True)]
    ends += [finished("baseline", spread(100), losses=(2.3, 2.3), has_tf32=True)]
    check = measure_rows([MAIN, BASELINE], ends)[-1].loss_check
    assert check is not None
    assert check.state == state


# The parts of a step


def test_the_parts_of_a_step_add_up_to_it() -> None:
    ends = [finished("main", spread(190), communication=21.5), finished("baseline", spread(100))]
    table = parts_table(measure_rows([MAIN, BASELINE], ends))
    assert table is not None
    cells = {cell.key: cell.value for cell in table.rows[-1] if isinstance(cell, Fact)}
    step = cells.pop("step_ms")
    assert step == pytest.approx(1000 * 64 / 190)
    assert sum(value or 0.0 for value in cells.values()) == pytest.approx(step)
    assert cells["unaccounted_ms"] == pytest.approx(0, abs=1e-9)


def with_paces(*ranks: Sequence[float]) -> Row:
    """A training whose ranks took these milliseconds in each round."""
    nodes = tuple(f"node-{rank + 1}" for rank in range(len(ranks)))
    paces = tuple(values(rounds, keeps_values=True) for rounds in ranks)
    uneven = parts(step_ms=337, communication=20).model_copy(update={"ranks": paces, "nodes": nodes})
    end = finished("main", spread(190))
    end = end.model_copy(update={"result": end.result.model_copy(update={"parts": uneven})})
    return measure_rows([MAIN, BASELINE], [finished("baseline", spread(100)), end])[-1]


def test_a_straggler_has_a_name() -> None:
    row = with_paces((200,) * 5, (280,) * 5)
    assert find_straggler(row) == (1, "node-2", 200, pytest.approx(1.4))
    table = parts_table([row])
    assert table is not None
    assert table.notes == ("2 workers (ddp): rank 1 on node-2 takes 1.40x the time of the other ranks.",)


@pytest.mark.parametrize("ranks_ms", [(200, 218), (200,), (300, 310, 300, 200)])
def test_ranks_that_keep_pace_have_none(ranks_ms: tuple[float, ...]) -> None:
    assert find_straggler(with_paces(*((ms,) * 5 for ms in ranks_ms))) is None


def test_a_rank_is_a_straggler_in_the_same_rounds_beyond_their_noise() -> None:
    """Bursts of load that slow both ranks don't hide it; rounds in which it was the faster one do."""
    load = (1.0, 1.6, 1.1, 2.0, 1.3)
    assert find_straggler(with_paces([200 * each for each in load], [280 * each for each in load]))
    assert find_straggler(with_paces((200,) * 4, (240, 320, 240, 320)))
    assert find_straggler(with_paces((200,) * 4, (190, 370, 190, 370))) is None
    assert find_straggler(with_paces((200,), (280,))) is None  # one round


# What scripts and MLflow get


def test_scripts_get_each_row_with_its_interval(tmp_path: Path) -> None:
    made = result(rows())
    record.save(made, tmp_path)
    facts = {(one["trial"], one["key"]): one for one in json.loads((tmp_path / record.FILE_NAME).read_text())["facts"]}
    main = facts["main", "speedup"]
    assert [main[end] for end in ("value", "low", "high")] == pytest.approx(
        [1.9, 1.9 * 1.02**-1.0946, 1.9 * 1.02**1.0946], rel=1e-4
    )
    assert facts["main", "speedup_rounds"]["value"] == 8
    assert facts["baseline", "samples_per_second"]["value"] == pytest.approx(100)
    assert facts["reference", "speedup"]["value"] == pytest.approx(1.8)
    assert facts["reference", "efficiency"]["value"] == pytest.approx(0.9)  # that of as many workers
    assert ("baseline", "speedup") not in facts
    assert record.read(tmp_path) == made


def test_what_is_no_number_is_null(tmp_path: Path) -> None:
    measured = measure_rows([MAIN], [finished("main", spread(190), metrics={"train/loss": float("nan")})])
    made = result_of_run(measured, hardware=HARDWARE)
    record.save(made, tmp_path)
    saved = json.loads((tmp_path / record.FILE_NAME).read_text(), parse_constant=pytest.fail)
    assert {one["value"] for one in saved["facts"] if one["key"] == "train/loss"} == {None}
    table = json.loads(record.mlflow_table(made), parse_constant=pytest.fail)
    assert table["data"][0][table["columns"].index("train/loss")] is None


def test_mlflow_has_a_table_of_all_trials_and_a_description_with_the_answer_and_the_notes() -> None:
    made = result(rows())
    table = json.loads(record.mlflow_table(made))
    cells = {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["data"]}
    assert set(cells) == {"main", "baseline", "reference"}
    assert [cells[name]["speedup_rounds"] for name in ("main", "reference", "baseline")] == [8, 8, None]
    assert cells["main"]["efficiency"] == pytest.approx(0.95)
    text = record.mlflow_description(made)
    assert text.startswith("**2 workers (ddp): 1.90x as fast as 1 worker (95% CI 1.86x to 1.94x)**\n")
    assert "| 2 workers (ddp) | 2 | 190 | 1.90x | 95% |\n" in text
    assert all(f"- {note}\n" in text for note in made.notes)


def test_no_two_numbers_share_a_name_in_mlflow() -> None:
    (row,) = measure_rows([MAIN], [finished("main", spread(190))])
    keys = [one.key for one in iter_facts(row)]
    names = [record.METRICS.get(key, key) for key in keys]
    assert len(set(names)) == len(names) == len(set(keys))
