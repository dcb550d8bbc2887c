"""fsdp through the commands: what fits, what each worker holds, more workers than rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import toys
from checkpointed import until
from ranks import Ranks

from pipeline.experiment.load import load
from pipeline.protocol.trial import Rank

ROUNDED = 1e-12
LARGE = "model={_target_: pipeline.models.MLP, in_features: 4, hidden: [40, 40], num_classes: 3}"
"""Three groups and a rest that is empty."""
STOPPED = 3  # Of eight steps, four in an epoch
OVERRIDES = [
    "train.precision=fp64", "checkpoint.every_steps=1", "checkpoint.keep=100", "train.global_batch_size=9",
    "data={_target_: lab.points, samples: 33}", "optimizer._target_=torch.optim.AdamW",
]  # fmt: skip


def test_a_batch_that_does_not_fit_on_one_rank_is_found(command: Callable[..., Any]) -> None:
    """That rank gives up in the middle of a pass, while the other goes on: it ends as well."""
    ended = command(
        "benchmark", "lab.yaml", "--json", "model={_target_: lab.Hungry, limit: 4, rank: 1}", *_WORKERS,
        "train.clip_grad_norm=1.0", "train.on_nonfinite=skip", "train.epochs=9", "--batch-sizes", "4", "--repeats", "1",
    )  # fmt: skip
    assert ended.code == 0, ended.output
    assert "2 workers (fsdp) was not measured: it does not fit into memory." in ended.stdout
    assert "samples_per_second" in ended.facts["fsdp-2-batch-4"]


def test_a_run_says_what_each_worker_holds(command: Callable[..., Any], tmp_path: Path) -> None:
    ended = command(
        "benchmark", "lab.yaml", LARGE, "--strategies", "ddp,fsdp", "--workers", "2", "--repeats", "1", *_WORKERS,
        f"tracking.directory={tmp_path}/runs", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db",
    )  # fmt: skip
    assert ended.code == 0, ended.output
    (folder,) = (tmp_path / "runs").iterdir()
    whole = " ".join(command("show", str(folder), "--full").stdout.split())
    assert "2 workers (fsdp): 3 x Linear and all other parameters are sharded across ranks." in whole


_WORKERS = ("parallel.strategy=fsdp", "parallel.workers=2", "parallel.launcher=torchrun")


@pytest.mark.timeout(600)
def test_more_workers_than_rows_to_share(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three classes on four ranks: the last one has nothing of some parameters. Then three ranks go on."""
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    expected = _trained(Rank(), tmp_path / "alone", "single")
    for world_size, name, stopped in ((4, "four", ""), (3, "four to three", "four")):
        if stopped:
            until(STOPPED, folder=tmp_path / stopped, to=tmp_path / name)
        with Ranks(world_size, timeout_s=300) as ranks:
            found = ranks.call(_trained, tmp_path / name, "fsdp", bool(stopped))[0]
        assert found.keys() == expected.keys()
        assert max(float((found[key] - expected[key]).abs().max()) for key in expected) <= ROUNDED


def _trained(rank: Rank, folder: Path, strategy: str, resume: bool = False) -> dict[str, Any]:
    """Train on a rank with checkpoints in a folder; return the weights, of rank 0."""
    how = {"strategy": strategy, "workers": rank.world_size, "checkpoints": str(folder), "resume": resume}
    _, kept = toys.trained(rank=rank, experiment=load("lab.yaml", OVERRIDES).experiment, **how)
    return dict(kept.files.get("model/weights.pt", {}))
