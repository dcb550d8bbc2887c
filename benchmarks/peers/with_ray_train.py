"""Ray Train's TorchTrainer around a loop written by hand; nothing is reported to it while training runs."""

import os
import sys
import tempfile

import ray
from peer import Job, Record
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from workloads import loss_of


def work() -> None:
    """Train on one worker."""
    job = Job()
    rank = get_context().get_world_rank()
    plain = job.model()
    model = prepare_model(plain)
    optimizer = job.optimizer(plain)
    loader = job.loader(ranks=range(rank, rank + 1))
    record = Record(job, steps_per_epoch=len(loader))
    for _ in range(job.epochs):
        for batch in loader:
            loss = loss_of(model, batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            record.step(loss)
    record.write()


def main() -> None:
    """Start Ray and train."""
    arguments, job = sys.argv, Job()

    def with_arguments() -> None:
        sys.argv = arguments
        work()

    ray.init(num_cpus=os.cpu_count(), include_dashboard=False, log_to_driver=False, configure_logging=False)
    with tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            with_arguments,
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=job.workers, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(name="peer", storage_path=folder),
        ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
