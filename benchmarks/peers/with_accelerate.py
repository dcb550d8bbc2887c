"""Accelerate around a loop written by hand; with several workers under torchrun, as its documentation allows."""

from accelerate import Accelerator
from peer import Job, Record
from workloads import loss_of


def main() -> None:
    """Train."""
    job = Job()
    accelerator = Accelerator(cpu=True)
    plain = job.model()
    # Its loader gives every worker each n-th batch, so it gets the batches of all ranks in turn.
    model, optimizer, loader = accelerator.prepare(plain, job.optimizer(plain), job.loader(ranks=range(job.workers)))
    record = Record(job, steps_per_epoch=len(loader))
    for _ in range(job.epochs):
        for batch in loader:
            loss = loss_of(model, batch)
            optimizer.zero_grad(set_to_none=True)
            accelerator.backward(loss)
            optimizer.step()
            record.step(loss)
    record.write()
    accelerator.end_training()


if __name__ == "__main__":
    main()
