"""Run a program of another library with pipeline's initial weights, order and random numbers; write its losses.

    python theirs.py EXPERIMENT.yaml LOSSES.json FIRST_EPOCH PROGRAM.py [ARGUMENT]...

The program is not changed: torch's samplers yield the order of the experiment, its own seed stands for the seed of the
model, samples and steps draw the numbers that pipeline draws for them, and each ``backward`` tells its loss. A step's
loss is the sum of the values that its micro-batches call ``backward`` on, which libraries have divided already.
"""

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import RandomSampler, WeightedRandomSampler
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from pipeline.experiment.load import load
from pipeline.experiment.targets import allowed_packages
from pipeline.protocol.trial import Baseline, Rank
from pipeline.train.build import build
from pipeline.train.order import keep_generators, mix, seed_all

Epochs = list[list[int]]


def order_of(path: str, epochs: int) -> tuple[Epochs, int]:
    """The samples of each epoch in pipeline's order, and the seed."""
    experiment = load(path).experiment
    trial = Baseline(
        name="order", experiment=experiment, strategy="single", launcher="inprocess", workers=1, devices_per_worker=0,
        device="cpu", cpus_per_worker=1, allowed=allowed_packages(), max_steps=1,
    )  # fmt: skip
    order = build(trial, rank=Rank()).order
    return [order.permutation(epoch).tolist() for epoch in range(epochs)], experiment.seed


class Recorder:
    """Losses of the program, and its place in the training."""

    def __init__(self, epochs: Epochs, *, seed: int, first_epoch: int) -> None:
        self.epochs, self.seed, self.epoch = epochs, seed, first_epoch - 1
        self.losses: list[float] = []
        self.parts: list[float] = []
        self.step = first_epoch * -(-len(epochs[0]) // 64)  # only used with batches of 64
        self.begins_step = True
        self.reseed = torch.manual_seed

    def install(self) -> None:
        backward, fetch = torch.Tensor.backward, _MapDatasetFetcher.fetch

        def recorded(loss: torch.Tensor, *arguments: Any, **keywords: Any) -> None:
            self.parts.append(float(loss.detach()))
            backward(loss, *arguments, **keywords)

        def sample(_: Any) -> Iterator[int]:
            self.epoch += 1
            return iter(self.epochs[self.epoch])

        def read(fetcher: Any, indices: Any) -> Any:
            with keep_generators():
                return fetch(_Seeded(fetcher, self), indices)

        def updated(*_: Any) -> None:
            self.losses.append(sum(self.parts))
            self.parts.clear()
            self.step += 1
            self.begins_step = True

        def forward(module: torch.nn.Module, _: Any) -> None:
            if self.begins_step and module.training and torch.is_grad_enabled():
                self.begins_step = False
                seed_all(mix(self.seed, "step", self.step, 0, 0))

        torch.manual_seed = lambda seed: self.reseed(mix(seed, "model"))
        torch.Tensor.backward = recorded  # type: ignore[method-assign]
        RandomSampler.__iter__ = sample  # type: ignore[method-assign]
        WeightedRandomSampler.__iter__ = sample  # type: ignore[method-assign]
        _MapDatasetFetcher.fetch = read  # type: ignore[method-assign]
        register_optimizer_step_post_hook(updated)
        torch.nn.modules.module.register_module_forward_pre_hook(forward)


class _Seeded:
    """A fetcher whose samples draw pipeline's random numbers; read one by one."""

    auto_collation = True

    def __init__(self, fetcher: Any, recorder: Recorder) -> None:
        self.collate_fn, self.dataset = fetcher.collate_fn, _Samples(fetcher.dataset, recorder)


class _Samples:
    def __init__(self, dataset: Any, recorder: Recorder) -> None:
        self.samples, self.recorder = dataset, recorder

    def __getitem__(self, index: int) -> Any:
        place = self.recorder.epoch
        seed_all(mix(self.recorder.seed, "sample", place, index))
        return self.samples[index]


def main() -> None:
    experiment, losses, first_epoch, *program = sys.argv[1:]
    sys.path.insert(0, str(Path.cwd()))
    epochs, seed = order_of(experiment, epochs=40)
    recorder = Recorder(epochs, seed=seed, first_epoch=int(first_epoch))
    recorder.install()
    sys.argv = program
    runpy.run_path(program[0], run_name="__main__")
    Path(losses).write_text(json.dumps(recorder.losses))


if __name__ == "__main__":
    main()
