"""Best weights, test set and later evaluations at any world size, and with sharded parameters."""

from pathlib import Path
from typing import Any

import pytest
import toys
from ranks import on_ranks

from pipeline.protocol.trial import Evaluation, Rank, Trial
from pipeline.training.loop import train
from pipeline.training.restored import evaluate_checkpoint

BEST = {"best": "validation/loss", "mode": "max", "keep": 1}


def result(folder: Path, *, rank: Rank, strategy: str) -> dict[str, Any]:
    trial = toys.trial(checkpoint=BEST, data={"_target_": "toys.with_test", "samples": 13}, train={"epochs": 3})
    update = {
        "strategy": strategy, "workers": rank.world_size, "checkpoints": str(folder / f"{strategy}-{rank.world_size}"),
        "train_only": True,
    }  # fmt: skip
    outbox = toys.Kept()
    done = train(trial.model_copy(update=update), rank=rank, outbox=outbox)
    assert done.best is not None
    weights = outbox.files.get("model/weights.pt", {})
    flat = [float(value) for tensor in weights.values() for value in tensor.flatten()]
    return {"step": done.best.step, "values": [done.metrics["validation/loss"], done.metrics["test/loss"], *flat]}


def evaluated(folder: Path, *, rank: Rank, strategy: str, of: str, step: int) -> list[float]:
    """Evaluate a checkpoint that another number of workers has saved, on both held-out sets."""
    made = toys.trial(checkpoint=BEST, data={"_target_": "toys.with_test", "samples": 13})
    shared = {name: getattr(made, name) for name in Trial.model_fields if name != "role"}
    shared |= {"strategy": strategy, "workers": rank.world_size, "checkpoints": str(folder / of), "step": step}
    found = [
        evaluate_checkpoint(Evaluation(**shared, split=split), rank=rank, outbox=toys.Kept())
        for split in ("validation", "test")
    ]
    return [found[0].values["validation/loss"], found[1].values["test/loss"]]


def _as_one(rank: Rank, folder: Path, expected: dict[str, Any], strategies: tuple[str, ...]) -> None:
    for strategy in strategies:
        found = result(folder, rank=rank, strategy=strategy)
        assert found["step"] == expected["step"]
        values = found["values"]
        assert values == pytest.approx(expected["values"][: len(values)], abs=1e-12)
        for of in ("single-1", f"{strategy}-{rank.world_size}"):
            later = evaluated(folder, rank=rank, strategy=strategy, of=of, step=found["step"])
            assert later == pytest.approx(expected["values"][:2], abs=1e-12)


@pytest.mark.parametrize(("world_size", "strategies"), [(2, ("ddp", "fsdp")), (4, ("ddp",))])
def test_the_best_weights_and_their_test_loss_are_those_of_one_process(
    tmp_path: Path, world_size: int, strategies: tuple[str, ...]
) -> None:
    expected = result(tmp_path, rank=Rank(), strategy="single")
    later = evaluated(tmp_path, rank=Rank(), strategy="single", of="single-1", step=expected["step"])
    assert later == expected["values"][:2]
    on_ranks(_as_one, tmp_path, expected, strategies, folder=tmp_path, world_size=world_size)
    for strategy in strategies:  # as one process exports it, whatever has saved it
        later = evaluated(
            tmp_path, rank=Rank(), strategy="single", of=f"{strategy}-{world_size}", step=expected["step"]
        )
        assert later == pytest.approx(expected["values"][:2], abs=1e-12)
