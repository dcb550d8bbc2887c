"""Accelerate around a hand-written loop; with several workers under torchrun, as its documentation allows."""

from accelerate import Accelerator
from job import Job


def main() -> None:
    """Train."""
    job = Job()
    accelerator = Accelerator(cpu=True)
    plain = job.model()
    # Its loader gives every worker each n-th batch, so it gets the batches of all ranks.
    model, optimizer, loader = accelerator.prepare(plain, job.optimizer(plain), job.loader())
    for _ in range(job.work.epochs):
        for batch in loader:
            loss = model(**batch)["loss"]
            optimizer.zero_grad(set_to_none=True)
            accelerator.backward(loss)
            optimizer.step()
    accelerator.end_training()


if __name__ == "__main__":
    main()
