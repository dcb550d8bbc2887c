"""A loop written by hand for torchrun, with DistributedDataParallel."""

import gc

import torch.distributed as dist
from peer import Job, Record
from torch.nn.parallel import DistributedDataParallel
from workloads import loss_of


def main() -> None:
    """Train."""
    job = Job()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = job.model()
    wrapped = DistributedDataParallel(model) if job.workers > 1 else model
    optimizer = job.optimizer(model)
    loader = job.loader(ranks=range(rank, rank + 1))
    record = Record(job, steps_per_epoch=len(loader))
    for _ in range(job.epochs):
        for batch in loader:
            loss = loss_of(wrapped, batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            record.step(loss)
    record.write()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    gc.collect()  # DDP's cycles keep gloo's threads alive, one of which may abort the process at its end
