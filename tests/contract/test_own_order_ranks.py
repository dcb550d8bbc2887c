"""Own and contiguous orders, iterable data, a batch by worker: the same training at 1, 2 and 4 workers, also resumed
within an epoch."""

import json
import re
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import samples
import toys
from ranks import on_ranks

from pipeline.errors import ExperimentError
from pipeline.protocol.events import Warned
from pipeline.protocol.trial import Rank
from pipeline.training import loop
from pipeline.training.checkpoints.manifest import folder_name
from pipeline.training.loop import train

WORKERS = (2, 4)
STOPPED = 3
"""Step within the first epoch of each case, after which it is resumed."""
CASES: dict[str, dict[str, Any]] = {
    "balanced": {
        "model": {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 3},
        "data": {"_target_": "toy_orders.imbalanced"},
        "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
        "order": {"weights": "balanced"},
    },
    "length": {
        "model": {"_target_": "torch.nn.Linear", "in_features": 30, "out_features": 1},
        "data": {"_target_": "toy_orders.ragged"},
        "loader": {"collate": {"_target_": "toy_orders.padded"}},
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 1e-3},
        "order": {"bucket_by": "length"},
    },
    "function": {
        "order": {"_target_": "toy_orders.twice"},
        "train": {"global_batch_size": None, "batch_size_per_worker": 2},
        "parallel": {"strategy": "ddp", "launcher": "torchrun", "workers": 4},
    },
    "contiguous": {
        "model": {"_target_": "toy_sequences.Net"},
        "data": {"_target_": "toy_sequences.text", "chunks": 51},
        "loss": None,
        "task": {"_target_": "pipeline.tasks.RecurrentLanguageModel"},
        "order": {"contiguous": True},
        "train": {"global_batch_size": 6, "evaluate_every_steps": 4, "clip_grad_norm": 0.5},  # shares of 2 and 1 rows
    },
    "iterable": {
        "data": {"_target_": "toy_streams.stream", "kind": "Shuffled", "validation": True},
        "train": {"global_batch_size": 6},  # four in the last batch of an epoch, so that some ranks have none
    },
    "endless": {
        "data": {"_target_": "toy_streams.stream", "kind": "Stateful", "validation": True},
        "train": {"epochs": None, "steps": 8, "global_batch_size": 6},
    },
}
SAVED_FOR_ALL = ("contiguous", "endless")
"""Cases whose checkpoints of several workers are continued by one."""


def _train(rank: Rank, folder: Path, case: str, *, resume: bool = False, **update: Any) -> dict[str, float]:
    loop.probe = lambda context, **_: samples.parts(step_ms=5.0)
    trial = toys.trial(**CASES[case], checkpoint={"every_steps": STOPPED, "keep": 100}).model_copy(
        update={
            "strategy": "single" if rank.world_size == 1 else "ddp",
            "workers": rank.world_size,
            "checkpoints": str(folder / "checkpoints"),
            "resume": resume,
            **update,
        }
    )
    kept = toys.Kept()
    train(trial, rank=rank, outbox=kept)
    assert not [event for event in kept.events if isinstance(event, Warned)]
    first = STOPPED if resume else 0
    points = [point for name in ("train/loss", "validation/loss") for point in kept.points(name)]
    return {f"{point.name} {point.step}": point.value for point in points if point.step > first}


def _all(rank: Rank, folder: Path) -> None:
    found = {}
    for case in CASES:
        whole = _train(rank, folder / case / "whole", case)
        found[case] = whole, _train(rank, folder / case / "resumed", case, resume=True)
    if rank.world_size == 2:
        found["fsdp"] = _train(rank, folder / "fsdp", "contiguous", strategy="fsdp")
        unseeded = {"_target_": "toy_streams.stream", "kind": "Unseeded"}
        for sections in ({"order": {"_target_": "toy_orders.of_the_process"}}, {"data": unseeded}):
            try:
                loop.build(toys.trial(**sections), rank=rank)
            except ExperimentError as error:
                found.setdefault("refused", []).append(str(error))
    (folder / f"{rank.rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Losses of one process, and of several from the beginning and from a checkpoint of the one."""
    root, probe = tmp_path_factory.mktemp("orders"), loop.probe
    reached: dict[str, Any] = {case: _train(Rank(), root / "1" / case, case) for case in CASES}
    loop.probe = probe
    for workers in WORKERS:
        folder = root / str(workers)
        for case in CASES:
            name = folder_name(STOPPED)
            shutil.copytree(root / "1" / case / "checkpoints" / name, folder / case / "resumed" / "checkpoints" / name)
        on_ranks(_all, folder, folder=folder, world_size=workers)
        reached[str(workers)] = json.loads((folder / "0.json").read_text())
    loop.probe = lambda context, **_: samples.parts(step_ms=5.0)
    for workers, case in product(WORKERS, SAVED_FOR_ALL):
        name = folder_name(STOPPED)
        place = root / "continued" / str(workers) / case
        shutil.copytree(root / str(workers) / case / "whole" / "checkpoints" / name, place / "checkpoints" / name)
        reached[str(workers)][f"{case}, one"] = _train(Rank(), place, case, resume=True)
    loop.probe = probe
    return reached


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("workers", WORKERS)
def test_any_number_of_workers_reaches_the_losses_of_one(found: dict[str, Any], workers: int, case: str) -> None:
    whole, resumed = found[str(workers)][case]
    assert len(whole) == len(found[case]) > 2 * STOPPED
    assert whole == pytest.approx(found[case], rel=1e-12)
    assert resumed == pytest.approx(_rest(found[case]), rel=1e-12)


@pytest.mark.parametrize("case", SAVED_FOR_ALL)
@pytest.mark.parametrize("workers", WORKERS)
def test_one_worker_continues_what_several_have_saved(found: dict[str, Any], workers: int, case: str) -> None:
    assert found[str(workers)][f"{case}, one"] == pytest.approx(_rest(found[case]), rel=1e-12)


def test_sharded_models_carry_the_state_of_their_rows(found: dict[str, Any]) -> None:
    assert found["2"]["fsdp"] == pytest.approx(found["contiguous"], rel=1e-12)


def _rest(whole: dict[str, float]) -> dict[str, float]:
    return {place: value for place, value in whole.items() if int(place.rpartition(" ")[2]) > STOPPED}


def test_what_differs_between_ranks_is_refused(found: dict[str, Any]) -> None:
    order, stream = found["2"]["refused"]
    assert order.startswith("order: differs between rank 0 and rank 1, which would train on other samples")
    assert re.match(r"data: sample \d+ of the training set differs between rank 0 and rank 1", stream)
