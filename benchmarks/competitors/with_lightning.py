"""Lightning's Trainer, which starts its own processes; logger, checkpoints, progress bar and summary are off."""

import logging
import warnings
from typing import Any

import lightning
import torch
from job import Job, local_rank
from torch import Tensor
from typing_extensions import override


class Module(lightning.LightningModule):
    """The model with its loss and optimizer."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job, self.model = job, job.model()

    @override
    def training_step(self, batch: Any, index: int) -> Tensor:
        loss: Tensor = self.model(**batch)["loss"]
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.job.optimizer(self.model)


def main() -> None:
    """Train."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    job = Job()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=job.workers,
        strategy="ddp" if job.workers > 1 else "auto",
        max_epochs=job.work.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,  # each rank gets its own batches already
    )
    trainer.fit(Module(job), job.loader(local_rank()))  # Lightning starts this script again for each further rank


if __name__ == "__main__":
    main()
