"""``pipeline remove`` in MLflow."""

# promise: `remove` deletes only what is meant: never a running run, a sweep with its trials, MLflow's runs restorably

from collections.abc import Callable
from pathlib import Path
from typing import Any

from recordings import Recording, Store

from pipeline.tracking.follow import sync_with_trials


def test_a_sweep_goes_with_its_runs_in_mlflow_which_can_be_restored(
    store: Store, journal: Callable[[str], Recording], lab: Path, command: Callable[..., Any], monkeypatch: Any
) -> None:
    swept, other = journal("sweep").folder, journal("single").folder
    for folder in (swept, other):
        assert all(outcome.delivered for outcome in sync_with_trials(folder, warn=print))
    monkeypatch.chdir(lab)
    before = {run.info.run_id: run.data.tags["pipeline.run"] for run in store.runs("tiny")}
    gone = {run_id for run_id, name in before.items() if name.startswith(swept.name)}
    assert len(gone) > 2

    asked = command("remove", swept.name)
    assert asked.code == 2
    assert "nothing is removed: the question can't be answered here. Use --yes." in asked.stderr
    ended = command("remove", swept.name, "--yes")
    assert ended.code == 0, ended.output
    assert f"removed {swept.name}" in ended.stdout
    assert (swept.exists(), other.exists()) == (False, True)
    assert {run.info.run_id for run in store.runs("tiny")} == set(before) - gone

    store.client.restore_run(min(gone))
    assert min(gone) in {run.info.run_id for run in store.runs("tiny")}
