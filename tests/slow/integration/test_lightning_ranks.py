"""A LightningModule trains as it does with Lightning's Trainer, and the same with any number of workers and resumed."""

# promise: a LightningModule: its logs, what is refused by name; as with Lightning's Trainer, 1 to 4 workers, resumed

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")
import lightning
import lit
import toys
from lit import trained, trial
from ranks import Ranks
from torch.utils.data import DataLoader, Subset

from pipeline.protocol.trial import Rank
from pipeline.train.build import build
from pipeline.train.storage import folder_name

NAMES = ("train/loss", "train/train_loss", "train/scale", "validation/loss", "validation/val_loss", "validation/val_f1")
STEPS = 6


class Losses(lightning.Callback):
    def __init__(self) -> None:
        self.training: list[float] = []
        self.validation: list[float] = []
        self.f1: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.training.append(float(outputs["loss"]))

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.validation.append(float(trainer.callback_metrics["val_loss"]))
        self.f1.append(float(trainer.callback_metrics["val_f1"]))


@pytest.mark.filterwarnings("ignore")
def test_the_losses_are_those_of_lightnings_trainer(tmp_path: Path) -> None:
    kept = trained()
    s = build(trial(), rank=Rank())  # the same initial weights and order
    module, losses = lit.Lit().double(), Losses()
    module.load_state_dict(s.model.state_dict())
    data, validation = toys.classification()
    order = [part.indices for step in range(STEPS) for part in s.batches.parts(step)]
    chosen = Subset(data, [index for batch in order[:3] for index in batch])
    again = Subset(data, [index for batch in order[3:] for index in batch])
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, precision="64-true", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, callbacks=[losses],
        reload_dataloaders_every_n_epochs=1,
    )  # fmt: skip
    trainer.fit(module, _Epochs([chosen, again], validation))
    assert losses.training == pytest.approx(kept.series("train/loss"), abs=1e-12)
    assert losses.validation == pytest.approx(kept.series("validation/loss"), abs=1e-6)  # Lightning sums in fp32
    assert losses.f1 == pytest.approx(kept.series("validation/val_f1"), abs=1e-6)


class _Epochs(lightning.LightningDataModule):
    """The samples of each epoch in pipeline's order."""

    def __init__(self, epochs: list[Any], validation: Any) -> None:
        super().__init__()
        self.epochs, self.validation = epochs, validation

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        return DataLoader(_double(self.epochs[self.trainer.current_epoch]), batch_size=8)

    def val_dataloader(self) -> Any:
        return DataLoader(_double(self.validation), batch_size=4)


def _double(data: Any) -> Any:
    return [(inputs.double(), target) for inputs, target in data]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_any_number_of_workers_has_the_same_losses_and_metrics(strategy: str) -> None:
    alone = trained()
    assert len(alone.series("validation/val_f1")) == 2
    for workers in (2, 4):
        with Ranks(workers, timeout_s=300) as ranks:
            together = ranks.call(_on_a_rank, strategy)[0]
        for name in NAMES[: None if strategy == "ddp" else -1]:
            tolerance = 1e-6 if name.endswith("f1") else 1e-12  # torchmetrics computes F1 in fp32
            assert together[name] == pytest.approx(alone.series(name), abs=tolerance), name


def _on_a_rank(rank: Rank, strategy: str) -> dict[str, list[float]]:
    outbox = trained(rank=rank, workers=rank.world_size, strategy=strategy, arguments={"measures": strategy == "ddp"})
    return {name: outbox.series(name) for name in NAMES}


def test_resumed_after_any_step_it_has_the_same_losses_to_the_bit(tmp_path: Path) -> None:
    whole = trained(checkpoints=tmp_path / "whole")
    for step in range(1, STEPS):
        folder = tmp_path / str(step)
        shutil.copytree(tmp_path / "whole" / folder_name(step), folder / folder_name(step))
        resumed = trained(checkpoints=folder)
        for name in ("train/loss", "train/place", "train/learning_rate"):
            assert _after(step, resumed, name) == _after(step, whole, name), (name, step)
            assert len(_after(step, resumed, name)) == STEPS - step
        assert _after(step, resumed, "validation/val_f1") == _after(step, whole, "validation/val_f1")


def _after(step: int, kept: toys.Kept, name: str) -> list[Any]:
    return [point for point in kept.points(name) if point.step > step]
