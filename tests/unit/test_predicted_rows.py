"""Predicted rows of a benchmark: what is measured for them, and where they are shown."""

# promise: `benchmark --predict`, the network measured and checked

import json
from typing import Any

import pytest
import toys
from samples import HARDWARE, MEASURED, comparison

from pipeline.commands.benchmark.matrix import Matrix, MatrixRequest, make_matrix
from pipeline.commands.benchmark.predicted_rows import Predictor, iter_unpredicted
from pipeline.errors import ResourceError
from pipeline.plan.resources import Resources
from pipeline.protocol.trial_result import AllReduce, BatchCost, Costs, Gradient, Link
from pipeline.report.report import Report, comparison_json
from pipeline.report.screens import format_screen
from pipeline.report.screens.screen_layout import HEIGHT, WIDTH, Places

LAPTOP = Resources(cpus=2, memory_mb=16384, node="laptop")
DDP = {"strategy": "ddp", "launcher": "torchrun", "workers": 2}
NETWORK = Link(latency_us=20, bandwidth_gbit=25)
CURVE = tuple(BatchCost(samples=size, forward_ms=3.0 * size, backward_ms=6.0 * size, data_ms=0.0) for size in (1, 64))
ALONE = Costs(curve=CURVE, gradients=(Gradient(bytes=4 * 2**20, ready=1.0),), world_size=1)
TOGETHER = ALONE.model_copy(
    update={"world_size": 2, "all_reduces": (AllReduce(bytes=4096, ms=0.1), AllReduce(bytes=4 * 2**20, ms=8.0))}
)


# What is measured for them


def matrix(*, network: Link | None = None, sections: dict[str, Any] | None = None, **wanted: Any) -> Matrix:
    experiment = toys.experiment(**{"parallel": DDP, **(sections or {})})
    request = MatrixRequest(predict=(8,), network=network, **wanted)
    return make_matrix(experiment, LAPTOP, allowed=("toys",), wanted=request)


def probed(made: Matrix) -> list[tuple[str, int]]:
    return [(trial.name, trial.repeat) for trial in made.plan.trials if trial.measures_costs]  # type: ignore[attr-defined]


def test_one_worker_and_the_largest_pair_measure_costs_once() -> None:
    made = matrix()
    assert probed(made) == [("baseline", 0), ("ddp-2", 0)]
    assert [cell.name for cell in made.cells] == ["baseline", "ddp-2"]


def test_with_a_given_network_one_worker_is_enough() -> None:
    made = matrix(network=NETWORK, sections={"parallel": {}})
    assert probed(made) == [("baseline", 0)]


def test_what_the_request_lacks_is_added() -> None:
    single = matrix(strategies=("single",))
    assert [cell.title for cell in single.cells] == ["1 worker", "ddp, 2 workers"]
    large = matrix(sections={"benchmark": {"baseline": {"strategy": "ddp", "workers": 2}}})
    assert (large.alone, probed(large)) == ("single-1", [("baseline", 0), ("single-1", 0)])


def test_a_network_that_cannot_be_measured_has_to_be_given() -> None:
    with pytest.raises(ResourceError, match="inprocess runs one process, so the network cannot be measured"):
        matrix(sections={"parallel": {}})
    with pytest.raises(ResourceError, match="two workers don't fit on laptop"):
        matrix(sections={"parallel": {**DDP, "cpus_per_worker": 2}})


# What they show


def predicted(*, network: Link | None = None, counts: tuple[int, ...] = (8, 64, 128)) -> Report:
    report = comparison()
    experiment = toys.experiment(train={"global_batch_size": 64})
    costs = {"baseline": ALONE} | ({} if network else {"ddp-2": TOGETHER})
    predictor = Predictor(report, experiment, alone=report.rows[0], costs=costs, network=network)
    forecast = predictor.predict(counts)
    return report.with_forecast(forecast, missing=tuple(iter_unpredicted(counts, batch=64)))


def test_they_follow_the_measured_rows_in_each_table() -> None:
    report = predicted(network=NETWORK)
    for table in (report.results, report.step_parts):
        assert [row[0] for row in table.rows[-2:]] == ["8 workers (ddp, predicted)", "64 workers (ddp, predicted)"]
    assert report.results.rows[-2][1:] == ("8 cores", "763", "7.63x", "95%", "-")
    reason = "128 workers (ddp, predicted) was not measured: 128 workers can't share a global batch of 64 samples."
    assert reason in report.results.notes
    assert report.main.trial == "ddp-2"


def test_their_speedup_is_over_the_measured_baseline() -> None:
    report = predicted(network=NETWORK)
    eight = report.predicted[0]
    assert eight.speedup == pytest.approx(eight.samples_per_second.median / 100)  # the geometric mean of its repeats
    assert eight.efficiency == pytest.approx(eight.speedup / 8)
    assert MEASURED["baseline"][0] == 100


def test_a_measured_network_is_checked_with_the_measured_rows() -> None:
    forecast = predicted().forecast
    assert forecast is not None
    assert [check.workers for check in forecast.checks] == [2]
    assert forecast.checks[0].measured == pytest.approx(1.9)
    first, second, *_ = forecast.notes
    assert "measured between 2 workers" in first
    assert second.startswith("Prediction checked with 2 workers: 1.90x measured, ")


def test_a_given_network_is_not_checked() -> None:
    forecast = predicted(network=NETWORK).forecast
    assert forecast is not None
    assert forecast.notes[0].startswith(
        "Predicted for a network of 25 Gbit/s and 20 us, as given, and gradients of 4 MiB. Limited by "
    )
    assert forecast.notes[1] == "The prediction is not checked: no measured workers use the given network."


def test_a_price_is_that_of_the_whole_training() -> None:
    report = comparison()
    rows = [row.model_copy(update={"whole_training": 36_000}) for row in report.rows]
    priced = report.model_copy(update={"rows": tuple(rows), "price_per_device_hour": 2.0})
    experiment = toys.experiment(train={"global_batch_size": 64})
    predictor = Predictor(priced, experiment, alone=rows[0], costs={"baseline": ALONE}, network=NETWORK)
    (eight,) = predictor.predict((8,)).rows
    start_s = priced.main.time_to_first_step_s or 0.0
    hours = (36_000 / eight.samples_per_second.median + start_s) / 3600
    assert eight.cost == pytest.approx(2.0 * 8 * hours)


def test_the_report_survives_json_and_its_records_mark_what_is_predicted() -> None:
    report = predicted(network=NETWORK)
    assert Report.model_validate_json(report.to_json()) == report
    document = json.loads(comparison_json(report))
    marked = [cell for cell in document["cells"] if cell["predicted"]]
    assert [cell["workers"] for cell in marked] == [8, 64]
    assert all(not cell["measured"] and cell["limited_by"] and cell["speedup"] for cell in marked)
    assert document["forecast"]["link"] == {"latency_us": 20.0, "bandwidth_gbit": 25.0}
    table = report.table()
    assert table["samples_per_second"][-1] == report.predicted[-1].samples_per_second.median
    assert table["limit"][-1] == report.predicted[-1].limit


def test_the_screen_has_room_for_both() -> None:
    screen = format_screen(predicted(network=NETWORK, counts=(8, 64)), Places(folder="runs/x", run="latest"))
    assert len(screen) <= HEIGHT
    assert max(map(len, screen)) <= WIDTH
    text = "\n".join(screen)
    assert "1 worker (baseline)" in text
    assert "8 workers (ddp, predicted)" in text
    assert HARDWARE.split(",")[0].replace("cores", "CPU cores") in text
