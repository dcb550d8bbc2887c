"""A hand-written loop; under torchrun with DistributedDataParallel."""

import gc
import os

import torch.distributed as dist
from job import Job, local_rank, train
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train."""
    job = Job()
    model = job.model()
    optimizer = job.optimizer(model)
    if "WORLD_SIZE" not in os.environ:
        train(job, model, optimizer, job.loader(0))
        return
    dist.init_process_group("gloo")
    train(job, DistributedDataParallel(model), optimizer, job.loader(local_rank()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    gc.collect()  # DDP's cycles keep gloo's threads alive, one of which may abort the process at its end
