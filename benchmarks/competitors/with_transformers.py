"""The Trainer of transformers; with several workers under torchrun. Nothing is logged or saved."""

import tempfile
from typing import Any

import torch
from job import Job
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from typing_extensions import override


class BatchTrainer(Trainer):
    """Takes its batches from outside, to have those of the other competitors."""

    def __init__(self, batches: DataLoader[Any], **keywords: Any) -> None:
        super().__init__(train_dataset=batches.dataset, **keywords)
        self._batches = batches

    @override
    def get_train_dataloader(self) -> DataLoader[Any]:
        prepared: DataLoader[Any] = self.accelerator.prepare(self._batches)
        return prepared


def main() -> None:
    """Train."""
    job = Job()
    model = job.model()
    optimizer = job.optimizer(model)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder,
            num_train_epochs=job.work.epochs,
            per_device_train_batch_size=job.work.batch // job.workers,
            use_cpu=True,
            max_grad_norm=0.0,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            ddp_find_unused_parameters=False,  # as in all others
        )
        BatchTrainer(job.loader(), model=model, args=options, optimizers=(optimizer, constant)).train()


if __name__ == "__main__":
    main()
