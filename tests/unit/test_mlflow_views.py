"""The saved views of MLflow's pages: columns, charts, and the trials of a sweep."""

# promise: columns and charts of MLflow's pages

import json
from typing import Any

import pytest

from pipeline.protocol.events import RunOpened, TrialOpened
from pipeline.recording.mlflow.mlflow_entities import metric_name, name_run, name_trial
from pipeline.recording.mlflow.mlflow_views import (
    columns,
    save_runs_view,
    save_trials_view,
    shared_params,
    varied_params,
)
from pipeline.recording.mlflow.store import run_page, runs_link, sweep_view

PARAMS = {"metrics.accuracy._target_": "torchmetrics.Accuracy", "name": "lab", "train.epochs": "3"}
SWEEP = {
    **PARAMS,
    "sweep.metric": "validation/accuracy",
    "sweep.mode": "max",
    "sweep.parameters.optimizer.lr.log_uniform": "[0.001, 1.0]",
    "sweep.parameters.model.hidden.choice[0]": "[32]",
    "sweep.parameters.model.hidden.choice[1]": "[64, 64]",
    "sweep.parameters.loss.choice[0]._target_": "torch.nn.CrossEntropyLoss",
    "sweep.parameters.loss.choice[1].weight": "2",
    "sweep.trials": "8",
}


class Store:
    """What a client of MLflow sets."""

    def __init__(self) -> None:
        self.tags: dict[str, str] = {}

    def set_experiment_tag(self, experiment: str, name: str, value: str) -> None:
        assert experiment == "7"
        self.tags[name] = value

    def view(self, name: str) -> Any:
        return json.loads(json.loads(self.tags[f"mlflow.sharedViewState.{name}"])["state"])


def trials_view(params: dict[str, str], **directions: Any) -> Any:
    store: Any = Store()
    save_trials_view(store, "7", sweep="20261123-lab", params=params, directions=directions, created_ms=1)
    (text,) = store.tags.values()
    assert len(text) < 5000, "older versions of MLflow take no longer tags"
    return store.view("sweep-20261123-lab")


def test_the_columns_of_runs_show_what_ran_and_what_came_out() -> None:
    shown = list(columns(PARAMS))
    assert shown[3:] == [
        "tags.`strategy`", "tags.`launcher`", "tags.`world_size`", "tags.`speedup`", "metrics.`validation/accuracy`",
        "metrics.`validation/loss`", "metrics.`train/loss`", "metrics.`samples_per_second`", "duration",
    ]  # fmt: skip
    assert sum(columns(PARAMS).values()) < 1660  # beside MLflow's menu, in a window of 1920 pixels


def test_charts_of_training_and_validation_come_first() -> None:
    store: Any = Store()
    save_runs_view(store, "7", params=PARAMS, created_ms=1)
    state = store.view("speedups")
    names = [section["name"] for section in state["compareRunSections"]]
    assert names[:2] == ["train", "validation"]
    assert names[-1] == "System metrics"
    assert state["isAccordionReordered"]  # else MLflow sorts them by name
    assert "attributes.`Duration`" in state["selectedColumns"]


def test_sections_of_a_runs_own_page_come_behind_training_and_validation() -> None:
    """There MLflow sorts the sections, a metric's name up to its last slash, and those without one come last."""
    ours = ["memory/peak_mb", "memory/peak_mb_rank_1", "throughput/workers", "time/step_ms", "badput/startup"]
    assert all(metric_name(name).rpartition("/")[0] > "validation" for name in ours)
    assert metric_name("memory/peak_mb_rank_1") == "workers/memory/peak_mib_rank_1"
    assert metric_name("time/rest_ms") == "workers/time/optimizer_and_other_ms"
    assert metric_name("wall_clock/redone") == metric_name("badput/lost_progress")  # as in a journal of before
    assert [metric_name(f"speedup_{name}") for name in ("low", "pairs")] == ["speedup_ci_low", "speedup_rounds"]
    for name in ("train/loss", "validation/time/loss", "speedup", "time_to_first_step_s"):
        assert metric_name(name) == name


@pytest.mark.parametrize(
    ("role", "title", "name"),
    [
        ("baseline", "1 worker", "baseline: 1 worker"),
        ("baseline", "ddp, 2 workers", "baseline: ddp, 2 workers"),
        ("reference", "1 process, 2 cores", "reference: 1 process, 2 cores"),
        ("cell", "ddp, 2 workers (static_graph)", "ddp, 2 workers (static_graph)"),
        ("probe", "ddp, 2 workers", "ddp, 2 workers"),
        ("baseline", "single", "baseline: 1 worker"),  # these as journals of before have them
        ("reference", "single, 2 cores", "reference: 1 process, 2 cores"),
        ("cell", "ddp x 2 (weak, static_graph)", "ddp, 2 workers (weak, static_graph)"),
        ("cell", "dp x 4", "dp, 4 GPUs"),
        ("cell", "ddp", "ddp, 1 worker"),
    ],
)
def test_a_measurement_is_named_by_what_it_is(role: Any, title: str, name: str) -> None:
    assert name_trial(TrialOpened(role=role, title=title, tags={}, params={})) == name


def test_a_run_is_named_by_what_it_is() -> None:
    def opened(title: str = "", **tags: str) -> RunOpened:
        return RunOpened(
            run="20261126-lab",
            tracking_uri="",
            tracking_experiment="lab",
            title=title,
            tags=tags,
            params={},
            trials=("main",),
        )

    ddp = {"role": "main", "strategy": "ddp", "world_size": "2"}
    assert name_run(opened(**ddp)) == "ddp, 2 workers"
    assert name_run(opened(quick="true", **ddp)) == "quick test: ddp, 2 workers"
    assert name_run(opened("my run", **ddp)) == "my run"
    assert (name_run(opened(role="compare")), name_run(opened(role="sweep"))) == ("benchmark", "sweep")
    assert name_run(opened(role="main")) == "20261126-lab"


def test_what_a_sweep_varies_is_named_as_in_its_trials() -> None:
    assert list(varied_params(SWEEP)) == ["optimizer.lr", "model.hidden", "loss._target_"]


def test_a_sweep_has_no_values_of_its_own_for_what_it_varies() -> None:
    own = {
        "optimizer.lr": "0.1",
        "model.hidden": "[8]",
        "loss._target_": "x",
        "optimizer.lr_decay": "2",
        "model.h": "1",
    }
    kept = shared_params({**SWEEP, **own})
    assert kept.keys() & own.keys() == {"optimizer.lr_decay", "model.h"}
    assert SWEEP.items() <= kept.items()
    assert shared_params({**PARAMS, **own}) == {**PARAMS, **own}


def test_the_view_of_a_sweep_has_its_trials_only_the_best_first() -> None:
    state = trials_view(SWEEP)
    assert state["searchFilter"] == "tags.sweep = '20261123-lab'"
    assert (state["orderByKey"], state["orderByAsc"]) == ("metrics.`validation/accuracy`", False)
    assert state["selectedColumns"][:4] == [
        "params.`optimizer.lr`", "params.`model.hidden`", "params.`loss._target_`", "metrics.`validation/accuracy`"
    ]  # fmt: skip
    (parallel,) = state["compareRunCharts"]
    assert parallel["selectedParams"] == ["optimizer.lr", "model.hidden", "loss._target_"]
    assert parallel["selectedMetrics"] == ["validation/accuracy"]
    assert parallel["metricSectionId"] == state["compareRunSections"][0]["uuid"]


def test_an_unknown_direction_orders_nothing() -> None:
    auto = {**SWEEP, "sweep.mode": "auto"}
    assert "orderByKey" not in trials_view(auto)
    assert trials_view(auto, **{"validation/accuracy": "max"})["orderByAsc"] is False
    loss = trials_view({**SWEEP, "sweep.mode": "auto", "sweep.metric": "validation/loss"})
    assert loss["orderByAsc"]


@pytest.mark.parametrize("address", ["http://127.0.0.1:5000", ""])
def test_links_open_the_views(address: str) -> None:
    start = f"{address}/#/" if address else "#/"
    assert runs_link(address, "7") == (
        f"{start}experiments/7/runs?viewStateShareKey=speedups&workflowType=machine_learning"
    )
    assert runs_link(address, "7", view=sweep_view("a b"), has_charts=True) == (
        f"{start}experiments/7/runs?viewStateShareKey=sweep-a%20b&compareRunsMode=CHART"
        "&workflowType=machine_learning"
    )  # fmt: skip
    assert run_page(address, "7", "abc") == f"{start}experiments/7/runs/abc?workflowType=machine_learning"
