"""Fine-tuning at any number of workers: initial weights, frozen parameters, parameter groups, batches of names."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import samples
import torch
import toys
from ranks import on_ranks
from safetensors.torch import save_file

from pipeline.errors import ExperimentError
from pipeline.protocol.trial import Rank, Weights
from pipeline.training import loop
from pipeline.training.checkpoints.manifest import folder_name
from pipeline.training.loop import train

GROUPS = [{"match": "*.bias", "weight_decay": 0.0}, {"match": "head.*", "lr": 0.02}]
CASES: dict[str, dict[str, Any]] = {
    "frozen, groups": {
        "model": {"_target_": "toys.NormedNet"},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.05, "weight_decay": 0.1, "groups": GROUPS},
        "train": {"freeze": ["body.1.*"], "clip_grad_norm": 1.0},
    },
    "a loss of its own": {
        "model": {"_target_": "toys.LossOfItsOwn"},
        "data": {"_target_": "toys.sequences"},
        "loss": None,
        "task": {"_target_": "pipeline.tasks.FromModel"},
        "train": {"gradient_accumulation": 2},
    },
}
NETS = {"frozen, groups": toys.NormedNet, "a loss of its own": toys.LossOfItsOwn}


def result(root: Path, case: str, *, rank: Rank, strategy: str, resume: bool = False) -> list[float]:
    loop.probe = lambda context, **_: samples.parts(step_ms=5.0)
    sections = CASES[case]
    start = {"start_from": {"file": str(root / f"{case}.safetensors")}}
    trial = toys.trial(**{**sections, "train": {**sections["train"], **start}}, checkpoint={"keep": 100})
    folder = root / ("alone" if resume else f"{strategy}-{rank.world_size}") / case
    own = {
        "strategy": strategy, "workers": rank.world_size, "checkpoints": str(folder), "resume": resume,
        "initial": Weights(path=start["start_from"]["file"], source=case) if rank.is_first else None,
    }  # fmt: skip
    kept = toys.Kept()
    done = train(trial.model_copy(update=own), rank=rank, outbox=kept)
    weights = kept.files.get("model/weights.pt", {})
    flat = [float(value) for name in sorted(weights) for value in weights[name].flatten()]
    return [done.metrics["validation/loss"], *flat]


def _as_one(rank: Rank, root: Path, expected: dict[str, list[float]], strategies: tuple[str, ...]) -> None:
    for case, values in expected.items():
        for strategy in strategies if "groups" in case else strategies[:1]:
            found = result(root, case, rank=rank, strategy=strategy)
            assert found == pytest.approx(values[: len(found)], abs=1e-12), f"{case}, {strategy}"
        resumed = result(root, case, rank=rank, strategy=strategies[0], resume=True)
        assert resumed == pytest.approx(values[: len(resumed)], abs=1e-12), f"{case}, resumed"
    _refused_alike(rank, root)


def _refused_alike(rank: Rank, root: Path) -> None:
    """All ranks raise the error of rank 0."""
    trial = toys.trial(train={"start_from": {"file": "lost.safetensors"}})
    initial = Weights(path=str(root / "lost.safetensors"), source="lost") if rank.is_first else None
    own = {"strategy": "ddp", "workers": rank.world_size, "initial": initial}
    with pytest.raises(
        ExperimentError, match=r"train\.start_from: .*lost\.safetensors can't be read on the node of rank 0"
    ):
        train(trial.model_copy(update=own), rank=rank, outbox=toys.Kept())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """Losses of one process by case, with its first checkpoints."""
    root, probe = tmp_path_factory.mktemp("finetuning"), loop.probe
    reached = {}
    for case, net in NETS.items():
        torch.manual_seed(9)
        save_file(net().state_dict(), root / f"{case}.safetensors")
        reached[case] = result(root, case, rank=Rank(), strategy="single")
        (root / "alone").mkdir(exist_ok=True)
        (root / "single-1" / case).rename(root / "alone" / case)
        steps = sorted(int(path.name.removeprefix("step-")) for path in (root / "alone" / case).glob("step-*"))
        assert len(steps) == 2
        shutil.rmtree(root / "alone" / case / folder_name(steps[-1]))
    loop.probe = probe
    return root, reached


@pytest.mark.parametrize(("world_size", "strategies"), [(2, ("ddp", "fsdp")), (4, ("ddp",))])
def test_it_trains_as_one_process_and_resumes(
    alone: tuple[Path, dict[str, list[float]]], tmp_path: Path, world_size: int, strategies: tuple[str, ...]
) -> None:
    root, expected = alone
    own = tmp_path / "copy"
    shutil.copytree(root, own)
    on_ranks(_as_one, own, expected, strategies, folder=tmp_path, world_size=world_size)
