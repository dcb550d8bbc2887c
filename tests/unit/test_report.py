"""Speedup, efficiency and remarks against figures worked out by hand."""

# promise: the speedup is the ratio of measured throughputs, with its interval; each advice has a measured reason

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import toys
from samples import (
    ALL_CORES,
    BASELINE,
    HARDWARE,
    MAIN,
    finished,
    in_turn,
    parts,
    report,
    spread,
    trial,
)

from pipeline.protocol.estimates import spread as values
from pipeline.protocol.trial import Trial
from pipeline.protocol.trial_result import Flops, Spread, StepParts, Unsaved
from pipeline.report.numbers.row import Advice
from pipeline.report.numbers.row_numbers import NUMBERS
from pipeline.report.page import publish
from pipeline.report.pictures.pairs import table as pairs_table
from pipeline.report.report import Report, run_json
from pipeline.report.report_files import PAGE_NAME
from pipeline.report.text.tables import Straggler, low_to_high


def compare(main: Trial, *, main_at: Spread, baseline_at: Spread) -> Report:
    ends = [finished(main.name, main_at), finished("baseline", baseline_at)]
    return Report.of([main, BASELINE], ends, hardware=HARDWARE)


def slots(**rates: Sequence[float]) -> Report:
    """The report of trials that were measured in turn, by name."""
    ends = [finished(name, spread(each[0]), slots=each) for name, each in rates.items()]
    return Report.of([MAIN, BASELINE, ALL_CORES][: len(ends)], ends, hardware=HARDWARE)


def test_speedup_of_slots_is_the_geometric_mean_of_their_ratios() -> None:
    """1, 2 and 4 times the baseline, whose pace changes."""
    result = slots(main=(100, 800, 40), baseline=(100, 400, 10))
    assert result.speedup == pytest.approx(2.0)
    assert result.efficiency == pytest.approx(1.0)
    assert result.main.speedup_rounds == 3
    assert result.main.speedup_ci_low * result.main.speedup_ci_high == pytest.approx(4.0)  # type: ignore[operator]


def test_speedup_is_the_ratio_of_medians_and_efficiency_divides_it_by_the_replicas() -> None:
    main = trial("main", "main", strategy="ddp", workers=4)
    result = compare(main, main_at=spread(300, noise=30), baseline_at=spread(100, noise=10))

    assert result.speedup == pytest.approx(3.0)
    assert result.efficiency == pytest.approx(0.75)
    assert result.main.speedup_ci_low == pytest.approx(270 / 110)
    assert result.main.speedup_ci_high == pytest.approx(330 / 90)
    assert result.main.cpus == 4


def test_replicas_of_dp_are_its_gpus() -> None:
    baseline = trial("baseline", "baseline", gpus=1)
    main = trial("main", "main", strategy="dp", gpus=4)
    ends = [finished("main", spread(200), slots=in_turn(200)), finished("baseline", spread(100), slots=in_turn(100))]
    result = Report.of([main, baseline], ends, hardware="4 x NVIDIA H200")

    assert (result.speedup, result.efficiency) == pytest.approx((2.0, 0.5))
    assert (result.main.title, result.main.devices) == ("dp, 4 GPUs", "4 GPUs")
    assert result.remarks == ()


def test_rows_are_baseline_then_references_by_size_then_main() -> None:
    more = [trial(f"ddp-{n}", "reference", strategy="ddp", workers=n) for n in (8, 4)]
    ends = [finished(t.name, spread(100)) for t in (MAIN, *more, BASELINE)]
    result = Report.of([MAIN, *more, BASELINE], ends, hardware=HARDWARE)
    assert [row.trial for row in result.rows] == ["baseline", "ddp-4", "ddp-8", "main"]
    assert result.main.trial == "main"


def test_more_cores_for_one_replica_have_the_efficiency_of_as_many_workers() -> None:
    reference = report().rows[1]
    assert reference.speedup == pytest.approx(1.8)
    assert reference.efficiency == pytest.approx(0.9)


def test_dp_with_one_replica_claims_nothing_however_fast_it_was() -> None:
    result = compare(trial("main", "main", strategy="dp"), main_at=spread(190), baseline_at=spread(100))
    assert result.speedup is None
    assert result.efficiency is None
    assert result.remarks == (
        "DataParallel (dp) needs at least 2 GPUs. With fewer it runs a single replica and gives no speedup.",
    )
    assert result.verdict == "1 worker (dp): 190 samples/s; speedup not measured"


def test_a_main_trial_that_repeats_the_baseline_claims_nothing() -> None:
    result = compare(trial("main", "main"), main_at=spread(120), baseline_at=spread(100))
    assert result.speedup is None
    assert result.remarks == ("The training and its baseline are both 1 worker.",)


def test_one_process_with_all_the_cores_is_named() -> None:
    assert report().remarks == (
        "2 workers and 1 process on both cores are equally fast within the noise (95% CI 0.97x to 1.15x).",
    )


def test_one_process_with_all_the_cores_is_compared_with_the_training() -> None:
    (remark,) = slots(main=in_turn(190, noise=0.025), baseline=in_turn(100), reference=in_turn(120)).remarks
    assert remark == "2 workers are 1.58x as fast as 1 process on both cores (95% CI 1.54x to 1.63x)."


@pytest.mark.parametrize(
    ("rate", "resolved"),
    [
        (103, False),  # 0.98 to 1.09: on both sides of 1
        (110, True),  # 1.04 to 1.16
        (90, True),  # 0.85 to 0.95: slower, and that is a result too
    ],
)
def test_a_speedup_whose_interval_holds_1_is_called_inconclusive(rate: float, resolved: bool) -> None:
    remarks = slots(main=in_turn(rate, noise=0.05), baseline=in_turn(100)).remarks
    assert bool(remarks) != resolved
    assert all(remark.startswith("2 workers (ddp): inconclusive, 0.98x to 1.09x (95% CI). ") for remark in remarks)


def test_windows_resolve_nothing_however_far_apart() -> None:
    """On a machine whose pace changes, three windows each are no sample of it."""
    (remark,) = compare(MAIN, main_at=spread(190, noise=1), baseline_at=spread(100, noise=1)).remarks
    assert remark == (
        "2 workers (ddp): inconclusive, 1.90x measured without a confidence interval. The baseline was not measured "
        "alternately with the training. Measure both in rounds: pipeline benchmark FILE"
    )


def test_a_trial_that_did_not_finish_is_left_out_and_named() -> None:
    ends = [finished("main", spread(190)), finished("baseline", spread(100))]
    result = Report.of([MAIN, BASELINE, ALL_CORES], ends, hardware=HARDWARE)
    assert [row.trial for row in result.rows] == ["baseline", "main"]
    assert result.remarks[0] == "reference (1 process, 2 cores) did not finish; it is left out."
    assert not any("cores does" in remark for remark in result.remarks)


def test_without_a_baseline_there_is_no_speedup() -> None:
    result = Report.of([MAIN, BASELINE], [finished("main", spread(190))], hardware=HARDWARE)
    assert result.speedup is None
    assert result.remarks == (
        "baseline (1 worker) did not finish; it is left out.",
        "There is no baseline measurement.",
    )


def test_a_training_only_has_no_empty_column_or_table(tmp_path: Path) -> None:
    end = finished("main", spread(190), metrics={"validation/accuracy": 0.9})
    bare = end.result.model_copy(update={"parts": StepParts(data_wait_ms=0.25, nodes=("a",))})
    only = MAIN.model_copy(update={"train_only": True})
    result = Report.of([only], [end.model_copy(update={"result": bare})], hardware=HARDWARE)
    assert [table.header for table in result.tables] == [("configuration", "devices", "samples/s")]
    assert result.remarks == ("--train-only: no speedup, no step-time breakdown, no recommendations.",)
    assert "| speedup |" not in result.markdown()
    publish.save(result, tmp_path, warn=pytest.fail)
    page = (tmp_path / PAGE_NAME).read_text()
    assert ("Step-time breakdown" in page, "--train-only: no speedup" in page) == (False, True)
    failed = Report.of([MAIN], [end.model_copy(update={"result": bare})], hardware=HARDWARE)
    assert len(failed.tables) == 1
    assert failed.remarks == ("There is no baseline measurement.", "The step-time breakdown could not be measured.")


def test_without_the_main_trial_there_is_nothing_to_report() -> None:
    with pytest.raises(ValueError, match=r"nothing to report: only baseline finished"):
        Report.of([MAIN, BASELINE], [finished("baseline", spread(100))], hardware=HARDWARE)


def test_the_report_survives_json() -> None:
    assert Report.model_validate_json(report().to_json()) == report()
    assert json.loads(report().to_json())["rows"][2]["speedup"] == pytest.approx(1.9)


def test_no_two_numbers_share_a_name() -> None:
    for names in ([number.name for number in NUMBERS], [number.metric for number in NUMBERS]):
        known = [name for name in names if name]
        assert len(known) == len(set(known))


def test_the_table_for_mlflow_has_one_entry_per_row_in_every_column() -> None:
    table = report().table()
    assert {len(column) for column in table.values()} == {3}
    assert table["samples_per_second_low"] == pytest.approx([100, 180 * 0.94, 190 / 1.02])
    assert table["speedup_rounds"] == [None, 8, 8]
    assert report(has_pairs=False).table()["samples_per_second_low"] == [95.0, 171.0, 188.0]
    assert table["efficiency"] == [None, *map(pytest.approx, (0.9, 0.95))]
    assert table["validation/accuracy"] == [None, None, 0.97345]
    assert table["peak_memory_mb"] == [410.0] * 3


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ({"train/loss": 0.25, "time/step_ms": 9.0, "validation/accuracy": 0.9}, "validation/accuracy 0.9, startup"),
        ({"train/loss": 0.25, "time/step_ms": 9.0}, "train/loss 0.25, startup"),
    ],
)
def test_the_outcome_is_what_the_training_reached(metrics: dict[str, float], text: str) -> None:
    result = Report.of([MAIN], [finished("main", spread(190), metrics=metrics)], hardware=HARDWARE)
    assert result.outcome == f"{text} 6.2 s, peak memory 410 MiB"


def test_a_schedule_that_looks_like_epochs_is_a_caveat() -> None:
    declared = {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 1}
    experiment = toys.experiment(scheduler=declared)
    main = trial("main", "main", strategy="ddp", workers=2).model_copy(update={"experiment": experiment})
    found = compare(main, main_at=spread(2.0), baseline_at=spread(1.0)).remarks
    assert sum("scheduler.step_size is 1. This counts steps" in one for one in found) == 1


def test_checkpoints_that_could_not_be_saved_are_named_at_the_end() -> None:
    main = finished("main", spread(100.0), unsaved=Unsaved(newest=8, failed=4, reason="disk full"))
    report = Report.of([trial("main", "main")], [main], hardware=HARDWARE)
    said = "he latest checkpoint is from step 8, but the training ended at step 24"
    assert report.verdict.endswith(f"; t{said}")
    assert f"T{said}. 4 checkpoints could not be saved: disk full." in report.all_notes
    assert json.loads(run_json(report, Path("f")))["unsaved"]["newest"] == 8


def test_markdown_holds_the_result_the_table_and_the_remarks() -> None:
    text = report().markdown()
    assert text.startswith("**2 workers (ddp): 1.90x as fast as 1 worker (95% CI 1.86x to 1.94x)**\n")
    assert "| 2 workers (ddp) | 2 cores | 190 | 1.90x (1.86-1.94) | 95% |\n" in text
    assert "**Notes**\n\n1. 2 workers and 1 process on both cores are equally fast" in text


def test_the_parts_of_a_step_add_up_to_it() -> None:
    table = report().step_parts
    assert table.header == (
        "configuration",
        "total",
        "compute",
        "exposed comm.",
        "data loading",
        "optimizer and other",
        "unaccounted",
    )
    assert table.rows[-1] == ("2 workers (ddp)", "336.8", "314.1", "21.5", "0.2", "1.0", "0.0")


def with_paces(*ranks: Sequence[float]) -> Report:
    """The report of a training whose ranks took these milliseconds in each round."""
    nodes = tuple(f"node-{rank + 1}" for rank in range(len(ranks)))
    paces = tuple(values(rounds, keeps_values=True) for rounds in ranks)
    uneven = parts(step_ms=337, communication=20).model_copy(update={"ranks": paces, "nodes": nodes})
    ends = [finished("baseline", spread(100)), finished("main", spread(190))]
    ends[1] = ends[1].model_copy(update={"result": ends[1].result.model_copy(update={"parts": uneven})})
    return Report.of([MAIN, BASELINE], ends, hardware=HARDWARE)


def test_a_straggler_has_a_name() -> None:
    result = with_paces((200,) * 5, (280,) * 5)
    found = Straggler.of(result.main)
    assert found is not None
    assert (found.rank, found.node, found.others_ms, found.ratio) == (1, "node-2", 200, pytest.approx(1.4))
    assert result.step_parts.notes == ("2 workers (ddp): rank 1 on node-2 takes 1.40x the time of the other ranks.",)


@pytest.mark.parametrize("ranks_ms", [(200, 218), (200,), (300, 310, 300, 200)])
def test_ranks_that_keep_pace_have_none(ranks_ms: tuple[float, ...]) -> None:
    assert Straggler.of(with_paces(*((ms,) * 5 for ms in ranks_ms)).main) is None


def test_a_rank_is_a_straggler_in_the_same_rounds_beyond_their_noise() -> None:
    """Bursts of load that slow both ranks don't hide it; rounds in which it was the faster one do."""
    load = (1.0, 1.6, 1.1, 2.0, 1.3)
    assert Straggler.of(with_paces([200 * each for each in load], [280 * each for each in load]).main)
    assert Straggler.of(with_paces((200,) * 4, (240, 320, 240, 320)).main)
    assert Straggler.of(with_paces((200,) * 4, (190, 370, 190, 370)).main) is None


@pytest.mark.parametrize("ranks", [((200,), (280,)), ((), ())])
def test_ranks_that_were_not_measured_in_rounds_have_no_straggler(ranks: Sequence[Sequence[float]]) -> None:
    assert Straggler.of(with_paces(*(each or (200.0,) for each in ranks)).main) is None
    paces = (spread(200), spread(280))
    row = with_paces((200,), (280,)).main
    assert Straggler.of(row.model_copy(update={"parts": row.parts.model_copy(update={"ranks": paces})})) is None


# This training


def timed(*, start_s: float, baseline_start_s: float | None, samples: int, noise: float = 0.0) -> Report:
    """The report of a whole training of so many samples."""
    more = {"whole_training": samples}
    ends = [
        finished("main", spread(190), slots=in_turn(190, noise=noise), start_s=start_s, **more),
        finished("baseline", spread(100), slots=in_turn(100), start_s=baseline_start_s, **more),
    ]
    return Report.of([MAIN, BASELINE], ends, hardware=HARDWARE)


def column(report: Report, name: str) -> list[str]:
    return [row[report.results.header.index(name)] for row in report.results.rows]


def test_each_strategy_has_the_time_that_this_training_takes_with_it() -> None:
    """19,000 samples at 100 and at 190 a second; what ran beside the training has the training's start."""
    report = timed(start_s=6.24, baseline_start_s=None, samples=19_000)
    assert column(report, "est. training time") == ["3 min 16 s", "1 min 46 s"]
    assert report.results.notes == (
        "Estimated training time: 19,000 samples at this throughput plus 6.2 s startup. Evaluation and checkpoints add "
        "to it.",
    )
    assert column(timed(start_s=26.0, baseline_start_s=2.0, samples=19_000), "est. training time") == [
        "3 min 12 s", "2 min 6 s"
    ]  # fmt: skip


@pytest.mark.parametrize(("cores", "is_told"), [(0.1, False), (0.3, True), (None, False)])
def test_what_else_a_machine_did_meanwhile_is_told(cores: float | None, is_told: bool) -> None:
    ends = [finished("main", spread(190), slots=in_turn(190), other_cores=cores)]
    ends += [finished("baseline", spread(100), slots=in_turn(100))]
    remarks = Report.of([MAIN, BASELINE], ends, hardware=HARDWARE).remarks
    said = "Other processes used 0.3 CPU cores during the measurement."
    assert any(remark.startswith(said) for remark in remarks) == is_told == bool(remarks)


def test_a_baseline_in_micro_batches_says_so_wherever_its_row_is_read(tmp_path: Path) -> None:
    """Batch statistics of micro-batches are a reason for another loss, also where workers share them."""
    coupled = {"coupling": ("SyncBatchNorm",), "losses": (2.3, 2.2, 2.1)}
    ends = [finished("main", spread(190), slots=in_turn(190), **coupled)]
    base = {"coupling": ("BatchNorm2d",), "losses": (2.3, 2.1, 1.9), "micro_batches": 2}
    ends += [finished("baseline", spread(100), slots=in_turn(100), **base)]
    result = Report.of([MAIN, BASELINE], ends, hardware=HARDWARE)
    title, name = "1 worker (2 micro-batches)", "1 worker (2 micro-batches"
    assert (result.results.rows[0][0], result.table()["title"][0]) == (f"{name}, baseline)", title)
    assert result.remarks == (
        "2 workers (ddp): Loss differs from the baseline's by up to 0.11 in the first 3 steps: the baseline computes "
        "the statistics of each of its 2 micro-batches.",
        f"{name}): 64 samples at once did not fit into memory next to the training. Each step has 2 micro-batches, "
        "as large as a worker's. BatchNorm2d took the statistics of each micro-batch.",
    )
    record = json.loads(run_json(result, tmp_path))
    assert (record["baseline"]["title"], record["remarks"]) == (title, list(result.remarks))


@pytest.mark.parametrize(("operations", "tolerance"), [("tf32", 1e-2), ("fp32", 1e-3)])
def test_losses_may_differ_by_the_rounding_of_tf32_where_it_was_used(operations: str, tolerance: float) -> None:
    """The operations that were counted show it, whatever the GPU is able to do."""
    flops = Flops(of_sample={operations: 1e6})
    ends = [finished("main", spread(190), losses=(2.3, 2.31), flops=flops, has_tf32=True)]
    ends += [finished("baseline", spread(100), losses=(2.3, 2.3), has_tf32=True)]
    main = Report.of([MAIN, BASELINE], ends, hardware=HARDWARE).main
    assert (main.loss_tolerance, main.same_training) == (tolerance, "yes" if operations == "tf32" else "no")


@pytest.mark.parametrize(("pairs", "is_told"), [(2, True), (4, True), (5, False)])
def test_a_speedup_of_few_pairs_is_told(pairs: int, is_told: bool) -> None:
    ends = [finished("main", spread(190), slots=in_turn(190, pairs=pairs), slots_s=136.0)]
    ends += [finished("baseline", spread(100), slots=in_turn(100, pairs=pairs))]
    remarks = Report.of([MAIN, BASELINE], ends, hardware=HARDWARE).remarks
    said = (
        f"Only {pairs} measurement rounds fit into benchmark.time_budget_s (they took 2 min 16 s), so the confidence "
        "interval is wide."
    )
    assert (said in remarks) == is_told


def test_where_the_start_eats_the_gain_it_says_from_when_on_it_pays() -> None:
    """28 s later, at 1/100 - 1/190 s less for each sample: 5,911 samples, or 93 steps of 64."""
    notes = timed(start_s=30.0, baseline_start_s=2.0, samples=1_900).results.notes
    assert notes == (
        "Estimated training time: 1,900 samples at this throughput plus 2.0 s to 30 s startup. Evaluation and "
        "checkpoints add to it.",
        "Startup with 2 workers takes 28 s longer than with 1 worker. The extra time is recovered after 93 steps.",
    )


@pytest.mark.parametrize(
    "more",
    [
        {"samples": 19_000},  # it pays
        {"noise": 1.5},  # nobody knows whether there is a gain
        {"baseline_start_s": 30.0},
        {"baseline_start_s": None},
    ],
)
def test_nothing_is_said_of_a_start_that_eats_no_gain(more: dict[str, float | None]) -> None:
    report = timed(**{"start_s": 30.0, "baseline_start_s": 2.0, "samples": 1_900, **more})  # type: ignore[arg-type]
    assert not any("recovered" in note for note in report.results.notes)


def test_of_a_training_of_unknown_length_nothing_is_said() -> None:
    assert "est. training time" not in report().results.header
    assert report().results.notes == ()


# Pairs


def test_pairs_are_a_table_of_each_round() -> None:
    slots_of = {"baseline": (100, 110), "main": (190, 220), "reference": (150, 165, 180)}
    lines = pairs_table(slots(**slots_of)).splitlines()
    assert lines == [
        'round,"1 worker, samples/s","1 process, both cores, samples/s","2 workers (ddp), samples/s",'
        "speedup of 2 workers (ddp)",
        "1,100,150,190,1.9",
        "2,110,165,220,2",
    ]


def test_pairs_of_a_comparison_that_was_interrupted_are_those_that_all_have() -> None:
    lines = pairs_table(slots(baseline=(100, 110, 105), main=(190, 220), reference=(150, 165))).splitlines()
    assert len(lines) == 3


def test_pairs_are_saved_with_their_picture_if_there_are_any(tmp_path: Path) -> None:
    told: list[str] = []
    names = publish.save(report(), tmp_path, warn=told.append)
    assert {"pairs.csv", "pairs.png"} < set(names)
    assert (tmp_path / "pairs.csv").read_text() == pairs_table(report())
    assert (tmp_path / "pairs.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "old").mkdir()
    assert not {"pairs.csv", "pairs.png"} & set(
        publish.save(report(has_pairs=False), tmp_path / "old", warn=told.append)
    )
    assert not told


def test_advice_is_numbered_reason_first() -> None:
    advice = (Advice(reason="Data wait is 14 ms.", change="write loader.num_workers: 2"),) * 2
    result = report().model_copy(update={"advice": advice})
    lines = ("1. Data wait is 14 ms: write loader.num_workers: 2", "2. Data wait is 14 ms: write loader.num_workers: 2")
    assert result.blocks[-1] == ("Recommendations", *lines)
    assert "\n".join(lines) in result.markdown()


@pytest.mark.parametrize(
    ("values", "text"), [((410.0, 402.5), "410"), ((410.0, 300.0), "300 to 410"), ((99.5,), "99.5"), ((), "-")]
)
def test_devices_that_are_uneven_show_both_ends(values: tuple[float, ...], text: str) -> None:
    assert low_to_high(values) == text


def test_a_run_for_scripts_has_its_training_baseline_and_references() -> None:
    record = json.loads(run_json(report(), Path("runs/20260301-1")))

    assert (record["run"], record["folder"]) == ("20260301-1", "runs/20260301-1")
    assert (record["main"]["title"], record["main"]["workers"]) == ("ddp, 2 workers", 2)
    assert record["main"]["speedup"] == pytest.approx(1.9)
    interval = [record["main"][name] for name in ("speedup_ci_low", "speedup_ci_high", "speedup_rounds", "confidence")]
    assert interval == [report().main.speedup_ci_low, report().main.speedup_ci_high, 8, 0.95]
    assert record["main"]["slots"] == list(in_turn(190, noise=0.02))
    assert (record["baseline"]["speedup"], record["baseline"]["slots"]) == (1, list(in_turn(100)))
    assert [row["title"] for row in record["references"]] == ["1 process, 2 cores"]
    assert record["metrics"] == {"validation/accuracy": 0.97345}


def test_a_run_of_windows_says_so_to_scripts() -> None:
    main = json.loads(run_json(report(has_pairs=False), Path("runs/x")))["main"]
    assert (main["speedup"], main["speedup_rounds"], main["slots"]) == (1.9, 0, None)


def test_what_is_no_number_is_null_for_scripts() -> None:
    diverged = report().main.model_copy(update={"metrics": {"train/loss": float("nan")}})
    rows = (*report().rows[:-1], diverged)
    record = json.loads(run_json(report().model_copy(update={"rows": rows}), Path("runs/x")))
    assert record["metrics"] == {"train/loss": None}
