"""Best weights and test set at any world size, and with sharded parameters."""

from pathlib import Path

import pytest
import toys
from ranks import on_ranks

from pipeline.protocol.trial import Rank
from pipeline.training.loop import train

BEST = {"best": "validation/loss", "mode": "max", "keep": 1}


def result(folder: Path, *, rank: Rank, strategy: str) -> dict[str, object]:
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


def _as_one(rank: Rank, folder: Path, expected: dict[str, list[float]], strategies: tuple[str, ...]) -> None:
    for strategy in strategies:
        found = result(folder, rank=rank, strategy=strategy)
        assert found["step"] == expected["step"]
        values = found["values"]
        assert isinstance(values, list)
        assert values == pytest.approx(expected["values"][: len(values)], abs=1e-12)


@pytest.mark.parametrize(("world_size", "strategies"), [(2, ("ddp", "fsdp")), (4, ("ddp",))])
def test_the_best_weights_and_their_test_loss_are_those_of_one_process(
    tmp_path: Path, world_size: int, strategies: tuple[str, ...]
) -> None:
    expected = result(tmp_path, rank=Rank(), strategy="single")
    on_ranks(_as_one, tmp_path, expected, strategies, folder=tmp_path, world_size=world_size)
