"""Lightning's Trainer, which starts its own processes; logger, checkpoints, progress bar and summary are off."""

import logging
import os
import warnings
from typing import Any

import lightning
import torch
from peer import Job, Record
from torch import Tensor, nn
from typing_extensions import override
from workloads import loss_of


class Module(lightning.LightningModule):
    """The model with its loss and optimizer."""

    def __init__(self, job: Job, model: nn.Module, record: Record) -> None:
        super().__init__()
        self.job, self.model, self.record = job, model, record

    @override
    def training_step(self, batch: Any, index: int) -> Tensor:
        return loss_of(self.model, batch)

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.record.step(outputs["loss"])

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.job.optimizer(self.model)

    @override
    def on_train_end(self) -> None:
        self.record.write()


def main() -> None:
    """Train."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    job = Job()
    rank = int(os.environ.get("LOCAL_RANK", "0"))  # Lightning starts this script again for each further rank
    loader = job.loader(ranks=range(rank, rank + 1))
    module = Module(job, job.model(), Record(job, steps_per_epoch=len(loader)))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=job.workers,
        strategy="ddp" if job.workers > 1 else "auto",
        max_epochs=job.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,  # the batches are dealt already
    )
    trainer.fit(module, loader)


if __name__ == "__main__":
    main()
