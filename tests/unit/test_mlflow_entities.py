"""Names of runs, parameters of a sweep, and links in MLflow."""

import pytest

from pipeline.protocol.events import RunOpened
from pipeline.tracking.mlflow import name_run, shared_params
from pipeline.tracking.store import run_page

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
    assert (name_run(opened(role="benchmark")), name_run(opened(role="sweep"))) == ("benchmark", "sweep")


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


@pytest.mark.parametrize("address", ["http://127.0.0.1:5000", ""])
def test_links_open_the_page_of_a_run(address: str) -> None:
    start = f"{address}/#/" if address else "#/"
    assert run_page(address, "7", "abc") == f"{start}experiments/7/runs/abc?workflowType=machine_learning"
