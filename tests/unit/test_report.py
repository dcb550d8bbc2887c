"""Speedup, efficiency and remarks against figures worked out by hand."""

import json
from pathlib import Path

import pytest
from samples import (
    ALL_CORES,
    BASELINE,
    HARDWARE,
    MAIN,
    finished,
    parts,
    report,
    spread,
    trial,
)

from pipeline.protocol.trial import Spread, Trial
from pipeline.report import Advice
from pipeline.report.report import Report, run_json
from pipeline.report.tables import Straggler, low_to_high, with_spread


def compare(main: Trial, *, main_at: Spread, baseline_at: Spread) -> Report:
    ends = [finished(main.name, main_at), finished("baseline", baseline_at)]
    return Report.of([main, BASELINE], ends, hardware=HARDWARE)


def test_speedup_is_the_ratio_of_medians_and_efficiency_divides_it_by_the_replicas() -> None:
    main = trial("main", "main", strategy="ddp", workers=4)
    result = compare(main, main_at=spread(300, noise=30), baseline_at=spread(100, noise=10))

    assert result.speedup == pytest.approx(3.0)
    assert result.efficiency == pytest.approx(0.75)
    assert result.main.speedup_low == pytest.approx(270 / 110)
    assert result.main.speedup_high == pytest.approx(330 / 90)
    assert result.main.cpus == 4


def test_replicas_of_dp_are_its_gpus() -> None:
    baseline = trial("baseline", "baseline", gpus=1)
    main = trial("main", "main", strategy="dp", gpus=4)
    ends = [finished("main", spread(200)), finished("baseline", spread(100))]
    result = Report.of([main, baseline], ends, hardware="4 x NVIDIA H200")

    assert (result.speedup, result.efficiency) == (2.0, 0.5)
    assert (result.main.title, result.main.devices) == ("dp x 4", "4 GPUs")
    assert result.remarks == ()


def test_rows_are_baseline_then_references_by_size_then_main() -> None:
    more = [trial(f"ddp-{n}", "reference", strategy="ddp", workers=n) for n in (8, 4)]
    ends = [finished(t.name, spread(100)) for t in (MAIN, *more, BASELINE)]
    result = Report.of([MAIN, *more, BASELINE], ends, hardware=HARDWARE)
    assert [row.trial for row in result.rows] == ["baseline", "ddp-4", "ddp-8", "main"]
    assert result.main.trial == "main"


def test_more_cores_for_one_replica_have_a_speedup_but_no_efficiency() -> None:
    reference = report().rows[1]
    assert reference.speedup == pytest.approx(1.8)
    assert reference.efficiency is None


def test_dp_with_one_replica_claims_nothing_however_fast_it_was() -> None:
    result = compare(trial("main", "main", strategy="dp"), main_at=spread(190), baseline_at=spread(100))
    assert result.speedup is None
    assert result.efficiency is None
    assert result.remarks == (
        "dp with fewer than two GPUs is one replica; nothing runs in parallel, so no speedup is claimed for it.",
    )
    assert "no speedup is claimed" in result.headline


def test_a_main_trial_that_repeats_the_baseline_claims_nothing() -> None:
    result = compare(trial("main", "main"), main_at=spread(120), baseline_at=spread(100))
    assert result.speedup is None
    assert result.remarks == ("The main trial and its baseline are both single, so no speedup is claimed.",)


def test_one_process_with_all_the_cores_is_named() -> None:
    assert report().remarks == (
        "One process with all 2 cores does 180 samples/s: on this machine it and ddp x 2 are equally fast within the "
        "noise. Data parallelism pays when devices are separate.",
    )


def test_one_process_with_all_the_cores_that_is_clearly_slower_gets_no_comment() -> None:
    speeds = {"main": spread(190, noise=2), "reference": spread(120, noise=2), "baseline": spread(100)}
    ends = [finished(name, speed) for name, speed in speeds.items()]
    (remark,) = Report.of([MAIN, BASELINE, ALL_CORES], ends, hardware=HARDWARE).remarks
    assert remark.endswith("on this machine ddp x 2 is 1.58x (1.54x to 1.63x) that.")


@pytest.mark.parametrize(
    ("main_at", "resolved"),
    [
        (spread(103, noise=5), False),  # 98/102 to 108/98: on both sides of 1
        (spread(110, noise=5), True),  # 105/102: all windows faster
        (spread(90, noise=5), True),  # 95/98: all windows slower, and that is a result too
    ],
)
def test_a_speedup_within_the_noise_is_called_unresolved(main_at: Spread, resolved: bool) -> None:
    remarks = compare(MAIN, main_at=main_at, baseline_at=spread(100, noise=2)).remarks
    remark = (
        "The speedup of ddp x 2, 1.03x (0.96x to 1.10x), is not resolved: it is within the noise of its measurement."
    )
    assert remarks == (() if resolved else (remark,))


def test_a_single_window_has_no_spread_to_show() -> None:
    result = compare(MAIN, main_at=spread(190, windows=1), baseline_at=spread(100))
    assert result.results.rows[-1][2] == "190"
    assert result.remarks == ("Some throughput was measured in a single window, so its noise is unknown.",)


def test_a_trial_that_did_not_finish_is_left_out_and_named() -> None:
    ends = [finished("main", spread(190)), finished("baseline", spread(100))]
    result = Report.of([MAIN, BASELINE, ALL_CORES], ends, hardware=HARDWARE)
    assert [row.trial for row in result.rows] == ["baseline", "main"]
    assert result.remarks == ("reference (single, 2 cores) did not finish; it is left out.",)


def test_without_a_baseline_there_is_no_speedup() -> None:
    result = Report.of([MAIN, BASELINE], [finished("main", spread(190))], hardware=HARDWARE)
    assert result.speedup is None
    assert result.remarks == (
        "baseline (single) did not finish; it is left out.",
        "There is no baseline measurement, so no speedup is claimed.",
    )


def test_without_the_main_trial_there_is_nothing_to_report() -> None:
    with pytest.raises(ValueError, match=r"nothing to report: only baseline finished"):
        Report.of([MAIN, BASELINE], [finished("baseline", spread(100))], hardware=HARDWARE)


def test_the_report_survives_json() -> None:
    assert Report.model_validate_json(report().to_json()) == report()
    assert json.loads(report().to_json())["rows"][2]["speedup"] == pytest.approx(1.9)


def test_the_table_for_mlflow_has_one_entry_per_row_in_every_column() -> None:
    table = report().table()
    assert {len(column) for column in table.values()} == {3}
    assert table["samples_per_second_low"] == [95.0, 171.0, 188.0]
    assert table["efficiency"] == [None, None, pytest.approx(0.95)]
    assert table["validation/accuracy"] == [None, None, 0.97345]
    assert table["peak_memory_mb"] == [410.0] * 3


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ({"train/loss": 0.25, "time/step_ms": 9.0, "validation/accuracy": 0.9}, "validation/accuracy 0.9, first step"),
        ({"train/loss": 0.25, "time/step_ms": 9.0}, "train/loss 0.25, first step"),
    ],
)
def test_the_outcome_is_what_the_training_reached(metrics: dict[str, float], text: str) -> None:
    result = Report.of([MAIN], [finished("main", spread(190), metrics=metrics)], hardware=HARDWARE)
    assert result.outcome == f"{text} after 6.2 s, peak memory 410 MB"


def test_markdown_holds_the_result_the_table_and_the_remarks() -> None:
    text = report().markdown()
    assert text.startswith("**ddp x 2 does 190 samples/s: 1.90x the throughput of single (1.79x to 2.02x)")
    assert "| ddp x 2 | 2 cores | 190 ± 2 | 1.90x | 95% |\n" in text
    assert "- One process with all 2 cores" in text


def test_the_parts_of_a_step_stand_next_to_their_sum() -> None:
    table = report().step_parts
    assert table.header == ("strategy", "step", "compute", "exposed comm.", "data wait", "rest", "sum")
    assert table.rows[-1] == ("ddp x 2", "336.8 ± 0.0", "314.1", "21.5", "0.2", "1.0", "336.8")


def with_paces(*ranks_ms: float, noise: float = 0.0) -> Report:
    nodes = tuple(f"node-{rank + 1}" for rank in range(len(ranks_ms)))
    paces = tuple(spread(ms, noise=noise) for ms in ranks_ms)
    uneven = parts(step_ms=337, communication=20).model_copy(update={"ranks": paces, "nodes": nodes})
    ends = [finished("baseline", spread(100)), finished("main", spread(190))]
    ends[1] = ends[1].model_copy(update={"result": ends[1].result.model_copy(update={"parts": uneven})})
    return Report.of([MAIN, BASELINE], ends, hardware=HARDWARE)


def test_a_straggler_has_a_name() -> None:
    result = with_paces(200, 280)
    assert Straggler.of(result.main) == Straggler(rank=1, node="node-2", others_ms=200, ratio=1.4)
    assert result.step_parts.notes == ("ddp x 2: rank 1 on node-2 takes 1.40x the time of the other ranks.",)


@pytest.mark.parametrize("ranks_ms", [(200, 218), (200,), (300, 310, 300, 200)])
def test_ranks_that_keep_pace_have_none(ranks_ms: tuple[float, ...]) -> None:
    assert Straggler.of(with_paces(*ranks_ms).main) is None


def test_a_rank_that_was_not_slower_in_every_round_is_no_straggler() -> None:
    assert Straggler.of(with_paces(200, 280, noise=39).main)
    assert Straggler.of(with_paces(200, 280, noise=40).main) is None


def test_advice_is_numbered_reason_first() -> None:
    advice = (Advice(reason="Data wait is 14 ms.", change="write loader.num_workers: 2"),) * 2
    result = report().model_copy(update={"advice": advice})
    lines = ("1. Data wait is 14 ms: write loader.num_workers: 2", "2. Data wait is 14 ms: write loader.num_workers: 2")
    assert result.advised == lines
    assert "\n".join(lines) in result.markdown()


@pytest.mark.parametrize(
    ("values", "text"), [((410.0, 402.5), "410"), ((410.0, 300.0), "300 to 410"), ((99.5,), "99.5"), ((), "-")]
)
def test_devices_that_are_uneven_show_both_ends(values: tuple[float, ...], text: str) -> None:
    assert low_to_high(values) == text


@pytest.mark.parametrize(
    ("given", "text"),
    [(spread(375, noise=13.5), "375 ± 14"), (spread(9.5, noise=0.25), "9.5 ± 0.25"), (spread(375, windows=1), "375")],
)
def test_a_spread_is_half_its_range(given: Spread, text: str) -> None:
    assert with_spread(given) == text


def test_a_run_for_scripts_has_its_training_baseline_and_references() -> None:
    record = json.loads(run_json(report(), Path("runs/20260301-1")))

    assert (record["run"], record["folder"]) == ("20260301-1", "runs/20260301-1")
    assert (record["main"]["title"], record["main"]["workers"]) == ("ddp x 2", 2)
    assert record["main"]["speedup"] == pytest.approx(1.9)
    assert record["baseline"]["speedup"] == 1
    assert [row["title"] for row in record["references"]] == ["single, 2 cores"]
    assert record["metrics"] == {"validation/accuracy": 0.97345}


def test_what_is_no_number_is_null_for_scripts() -> None:
    diverged = report().main.model_copy(update={"metrics": {"train/loss": float("nan")}})
    rows = (*report().rows[:-1], diverged)
    record = json.loads(run_json(report().model_copy(update={"rows": rows}), Path("runs/x")))
    assert record["metrics"] == {"train/loss": None}
