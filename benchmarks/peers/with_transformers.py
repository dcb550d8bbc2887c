"""The Trainer of transformers on the same batches; with several workers under torchrun. Nothing is logged or saved."""

import tempfile
from typing import Any

import torch
from peer import Job, Record
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments
from typing_extensions import override
from workloads import loss_of


class BareTrainer(Trainer):
    """Takes its batches and its loss from outside."""

    def __init__(self, job: Job, *, batches: DataLoader[Any], **keywords: Any) -> None:
        super().__init__(**keywords)
        self.batches = batches
        self.latest = torch.zeros(())

    @override
    def get_train_dataloader(self) -> DataLoader[Any]:
        prepared: DataLoader[Any] = self.accelerator.prepare(self.batches)
        return prepared

    @override
    def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Tensor:
        self.latest = loss_of(model, inputs)
        return self.latest

    @override
    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs  # a pair, not a mapping of names


class Steps(TrainerCallback):
    """Tells the record of each step."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.trainer: BareTrainer

    @override
    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.record.step(self.trainer.latest)

    @override
    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.record.write()


def main() -> None:
    """Train."""
    job = Job()
    model = job.model()
    optimizer = job.optimizer(model)
    batches = job.loader(ranks=range(job.workers))
    steps = Steps(Record(job, steps_per_epoch=len(batches) // job.workers))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=job.epochs,
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
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        steps.trainer = BareTrainer(
            job,
            batches=batches,
            model=model,
            args=arguments,
            train_dataset=batches.dataset,
            optimizers=(optimizer, constant),
            callbacks=[steps],
        )
        steps.trainer.train()


if __name__ == "__main__":
    main()
