"""A loop written by hand: one process, nothing around the model."""

from peer import Job, Record
from workloads import loss_of


def main() -> None:
    """Train."""
    job = Job()
    model = job.model()
    optimizer = job.optimizer(model)
    loader = job.loader(ranks=range(1))
    record = Record(job, steps_per_epoch=len(loader))
    for _ in range(job.epochs):
        for batch in loader:
            loss = loss_of(model, batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            record.step(loss)
    record.write()


if __name__ == "__main__":
    main()
