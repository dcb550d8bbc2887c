"""Ray Train's TorchTrainer around a hand-written loop; nothing is reported to it while training runs."""

import os
import sys
import tempfile

import ray
from job import Job, train
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model


def main() -> None:
    """Start Ray and train."""
    arguments, workers = sys.argv, Job().workers

    def work() -> None:
        sys.argv = arguments
        job = Job()
        plain = job.model()
        train(job, prepare_model(plain), job.optimizer(plain), job.loader(get_context().get_world_rank()))

    ray.init(num_cpus=os.cpu_count(), include_dashboard=False, log_to_driver=False, configure_logging=False)
    with tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            work,
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(name="peer", storage_path=folder),
        ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
