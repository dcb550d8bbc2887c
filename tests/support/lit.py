"""LightningModules for tests of `pipeline.tasks.Lightning`; needs lightning."""

from pathlib import Path
from typing import Any

import lightning
import torch
import toys
from torch import Tensor, nn
from torchmetrics.classification import MulticlassF1Score

from pipeline.protocol.trial import Rank, Trial
from pipeline.train.run import train

TASK = "pipeline.tasks.Lightning"


def trial(module: str = "Lit", *, checkpoints: Path | str = "", arguments: Any = None, **wanted: Any) -> Trial:
    """Return a trial of a module that starts from the newest checkpoint, if there is one."""
    task = {"_target_": TASK, "module": {"_target_": f"lit.{module}", **(arguments or {})}}
    sections = {"data": {"_target_": "toys.classification"}, "checkpoint": {"every_steps": 1, "keep": 100}, **wanted}
    left_out = dict.fromkeys(("model", "loss", "optimizer"))
    return toys.trial(task=task, checkpoints=str(checkpoints), resume=True, **left_out, **sections)


def trained(module: str = "Lit", *, rank: Rank = Rank(), **wanted: Any) -> toys.Kept:  # noqa: B008 (frozen)
    """The events of a training on a rank."""
    outbox = toys.Kept()
    train(trial(module, **wanted), rank=rank, outbox=outbox)
    return outbox


class Lit(lightning.LightningModule):
    """A classifier of `toys.classification` with logs, hyperparameters and a metric."""

    def __init__(self, lr: float = 0.1, interval: str = "step", measures: bool = True) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(0.0), nn.Linear(5, 3))
        self.f1 = MulticlassF1Score(num_classes=3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        outputs = self(inputs)
        loss = nn.functional.cross_entropy(outputs, targets)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=False)
        self.log_dict({"scale": outputs.abs().mean(), "place": float(self.global_step + 100 * self.current_epoch)})
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        outputs = self(inputs)
        self.f1(outputs, targets)
        self.log("val_loss", nn.functional.cross_entropy(outputs, targets), prog_bar=True)
        if self.hparams.measures:
            self.log("val_f1", self.f1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.hparams.interval}}


class PlateauLit(Lit):
    """Divides its rate by 10 after each evaluation, as nothing improves by a million."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0, threshold=1e6)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_f1"}}


class ManualLit(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class HookedLit(Lit):
    def on_train_epoch_end(self) -> None:
        pass

    def train_dataloader(self) -> Any:
        return []


class SeveralLit(Lit):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(one.parameters(), lr=0.1) for one in (self.net[0], self.net[3])]


class PlainLit(Lit):
    configure_optimizers = lightning.LightningModule.configure_optimizers


class SilentLit(Lit):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())
