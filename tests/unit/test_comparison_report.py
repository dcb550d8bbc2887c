"""Comparisons against figures worked out by hand: pairs of repeats, cells without figures, losses, and their JSON."""

import json
from typing import Any

import pytest
from samples import BASELINE, DDP_2, DDP_4, HARDWARE, LARGER, LOSSES, MEASURED, comparison, finished, spread

from pipeline.protocol.trial_result import BATCH_TRANSFORM, RANDOM_NUMBERS
from pipeline.report.report import Report, comparison_json


def test_a_comparison_pairs_its_repeats() -> None:
    ddp = comparison().main
    assert ddp.trial == "ddp-2"  # the larger batch has the higher speedup, but trains something else
    # Student's t of 3 pairs, 4.303, times the root of 1.5 / 3, times the deviation
    ends = (1.9 * 1.02**-3.0425, 1.9 * 1.02**3.0425)
    assert (ddp.speedup, ddp.speedup_ci_low, ddp.speedup_ci_high) == pytest.approx((1.9, *ends), rel=1e-4)
    assert (ddp.speedup_rounds, ddp.is_resolved) == (3, True)
    assert ddp.efficiency == pytest.approx(0.95)
    rate = ddp.samples_per_second
    assert (rate.median, rate.low, rate.high) == pytest.approx((190, 152 / 1.02, 237.5 * 1.02))
    larger = comparison().rows[-1]
    assert (larger.speedup, larger.speedup_ci_low) == pytest.approx((1.96, 1.96 * 1.02**-3.0425), rel=1e-4)


def test_a_comparison_of_one_round_asks_for_more() -> None:
    (remark,) = compared((190,)).remarks
    assert remark == (
        "2 workers (ddp): inconclusive, 1.90x measured without a confidence interval. It was measured once, so the "
        "noise is unknown. Measure several times: pipeline benchmark FILE --repeats 5"
    )


def test_the_tables_of_a_comparison_keep_the_order_and_the_cells_that_are_not_measured() -> None:
    table = comparison().results
    assert table.rows == (
        ("1 worker (baseline)", "1 core", "100", "-", "-", "-"),
        ("1 process, both cores", "2 cores", "150", "1.50x (1.50-1.50)", "75%", "same"),
        ("2 workers (ddp)", "2 cores", "190", "1.90x (1.79-2.02)", "95%", "same"),
        ("4 workers (ddp)", "-", "-", "not measured", "-", "-"),
        ("2 workers (ddp, batch 64)", "2 cores", "196", "1.96x (1.85-2.08)", "98%", "-"),
    )
    assert table.emphasis == 2
    assert table.notes == (
        "4 workers (ddp) was not measured: 4 workers with 1 core each need 4 cores; this machine has 2.",
    )  # fmt: skip


def test_without_an_order_unmeasured_cells_follow_those_that_are_measured() -> None:
    ends = [finished(one.name, spread(100)) for one in (BASELINE, DDP_2, LARGER)]
    result = Report.of([BASELINE, LARGER, DDP_2], ends, hardware=HARDWARE, unmeasured=[DDP_4])
    assert [entry.trial for entry in result.entries] == ["baseline", "ddp-2-batch-64", "ddp-2", "ddp-4"]


def compared(throughput: tuple[float, ...], *, larger: float = 0) -> Report:
    ends = [finished("baseline", spread(100)) for _ in throughput]
    ends += [finished("ddp-2", spread(rate)) for rate in throughput]
    ends += [finished("ddp-2-batch-64", spread(larger), batch=128) for _ in throughput if larger]
    return Report.of([BASELINE, DDP_2, LARGER][: 3 if larger else 2], ends, hardware=HARDWARE)


@pytest.mark.parametrize(
    ("throughput", "verdict"),
    [
        ((180, 190, 200), "2 workers (ddp): 1.90x as fast as 1 worker (95% CI 1.58x to 2.28x)"),
        ((88, 90, 92), "2 workers (ddp): 1.11x slower than 1 worker (95% CI 1.03x to 1.20x)"),
        ((95, 103, 110), "2 workers (ddp): inconclusive, 0.79x to 1.32x (95% CI)"),
    ],
)
def test_the_verdict_says_whether_anything_beats_the_baseline(throughput: tuple[float, ...], verdict: str) -> None:
    assert compared(throughput).verdict == verdict


def test_the_verdict_is_about_the_row_that_trains_the_same_batches() -> None:
    verdict = "2 workers (ddp): 1.90x as fast as 1 worker (95% CI 1.58x to 2.28x)"
    assert compared((180, 190, 200), larger=250).verdict == verdict


def test_a_comparison_of_which_only_the_baseline_was_reached_claims_nothing() -> None:
    result = Report.of([BASELINE, DDP_2], [finished("baseline", spread(100))], hardware=HARDWARE, unmeasured=[DDP_4])
    assert result.verdict == "1 worker: 100 samples/s; speedup not measured"
    assert result.remarks == ("ddp-2 (ddp, 2 workers) did not finish; it is left out.",)


def test_other_losses_have_the_layers_for_their_reason() -> None:
    result = comparison(losses=(2.3, 2.121, 1.9, 1.7), coupling=("BatchNorm2d", "Dropout"))
    # 0.021 of 2.1, which is above 1
    assert result.remarks[0] == (
        "2 workers (ddp): Loss differs from the baseline's by up to 0.01 in the first 3 steps: BatchNorm2d computes "
        "its statistics separately on each worker, Dropout draws a different mask on each worker."
    )
    assert result.results.rows[2][-1] == "differs"


@pytest.mark.parametrize(
    ("coupling", "reason"),
    [
        ((RANDOM_NUMBERS,), "each worker draws different random numbers"),
        ((BATCH_TRANSFORM,), "train.batch_transform mixes the samples of each worker separately"),
        (("Dropout", RANDOM_NUMBERS), "Dropout draws a different mask on each worker"),
        (("buffer mean",), "the buffer mean is computed separately on each worker"),
        (("buffers mean, scale",), "the buffers mean, scale are computed separately on each worker"),
    ],
)
def test_what_the_first_step_showed_is_a_reason(coupling: tuple[str, ...], reason: str) -> None:
    (remark, *_) = comparison(losses=(2.3, 2.121, 1.9, 1.7), coupling=coupling).remarks
    assert remark.endswith(f"in the first 3 steps: {reason}.")


def test_buffers_of_a_share_are_told_though_the_loss_is_the_same() -> None:
    (remark, *_) = comparison(coupling=("BatchNorm2d", "buffer mean")).remarks
    assert remark == (
        "The buffer mean is computed separately on each worker, and only rank 0's copy is saved. Training in one "
        "process differs."
    )


def test_other_losses_without_a_reason_are_a_warning() -> None:
    (warning, *_) = comparison(losses=(2.3, 2.121, 1.9, 1.7)).remarks
    assert warning.startswith("2 workers (ddp): Loss differs")
    assert "Rounding explains at most 0.001. The two do not train the same model, so ignore the speedup." in warning


def test_losses_that_drift_apart_later_are_explained_by_rounding() -> None:
    result = comparison(losses=(2.3, 2.1, 1.9, 1.9), coupling=("BatchNorm2d",))
    assert result.remarks[0].startswith(
        "2 workers (ddp): Loss equals the baseline's for 3 steps, then drifts by up to 0.12"
    )
    assert result.results.rows[2][-1] == "same early"


def test_the_same_losses_need_no_remark_and_other_batches_are_explained() -> None:
    assert comparison().main.losses == LOSSES
    all_cores, batches = comparison().remarks
    assert all_cores.startswith("2 workers are 1.27x as fast as 1 process on both cores")
    assert batches.startswith("Other batch sizes: the global batch size is")


def cells_of(result: Report) -> Any:
    return json.loads(comparison_json(result))["cells"]


def test_the_json_of_a_comparison_has_every_cell_in_the_order_asked_for() -> None:
    baseline, ddp, missing, larger = cells_of(comparison())
    assert (baseline["speedup"], baseline["efficiency"], baseline["role"]) == (1.0, 1.0, "baseline")
    assert (ddp["speedup"], ddp["speedup_ci_low"], ddp["speedup_ci_high"]) == pytest.approx(
        (1.9, 1.789, 2.018), rel=1e-3
    )
    assert (ddp["speedup_rounds"], ddp["confidence"], ddp["slots"]) == (3, 0.95, list(MEASURED["ddp-2"]))
    assert (baseline["slots"], missing["slots"], baseline["speedup_rounds"]) == (list(MEASURED["baseline"]), None, None)
    assert ddp["samples_per_second"] == pytest.approx(190)
    assert ddp["spread"] == pytest.approx({"low": 152 / 1.02, "high": 237.5 * 1.02})
    assert (ddp["measured"], ddp["reason"], ddp["exposed_communication_ms"]) == (True, None, 21.5)
    assert (ddp["peak_memory_mb"], ddp["largest_loss_difference"]) == ([410, 410], 0)
    assert larger["largest_loss_difference"] is None
    assert (missing["measured"], missing["reason"]) == (False, DDP_4.reason)
    known = {"strategy", "workers", "title", "role", "measured", "predicted", "reason"}
    assert {name for name, value in missing.items() if value is not None} == known
    assert list(missing) == list(ddp)


def test_the_reference_stands_beside_the_cells() -> None:
    document = json.loads(comparison_json(comparison()))
    assert document["reference"]["speedup"] == pytest.approx(1.5)
    assert document["reference"]["efficiency"] == pytest.approx(0.75)
    assert list(document) == ["cells", "reference", "forecast", "advice", "name", "hardware", "verdict", "remarks"]
    assert document["verdict"] == comparison().verdict
    assert json.loads(comparison_json(compared((190,))))["reference"] is None


def test_a_loss_that_diverged_is_no_number_in_json() -> None:
    assert cells_of(comparison(losses=(float("nan"),) * 4))[1]["largest_loss_difference"] is None


def test_the_table_for_mlflow_has_the_cells_that_are_not_measured() -> None:
    table = comparison().table()
    assert table["title"][3] == "ddp, 4 workers"
    assert table["reason"] == [None, None, None, DDP_4.reason, None]
    assert table["speedup"][3] is None
