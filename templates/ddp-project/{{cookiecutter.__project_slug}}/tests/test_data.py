"""Requirements on the data: two map-style datasets of (inputs, target), the same in every worker."""

import torch
from conftest import SMOKE
from pipeline import Experiment, Parts


def test_all_samples_make_a_batch(built: Parts) -> None:
    """Samples have the same shape and no missing values."""
    for samples, validation in ((built.train_samples, False), (built.validation_samples, True)):
        assert samples > 0
        for values in built.batch(range(samples), validation=validation):
            assert len(values) == samples
            assert torch.isfinite(values).all()


def test_the_loss_takes_every_target(built: Parts) -> None:
    built.model.eval()
    for first in range(0, built.train_samples, 10):
        batch = built.batch(range(first, min(first + 10, built.train_samples)))
        with torch.no_grad():
            assert torch.isfinite(built.step(batch).sum), f"samples from {first} on"


def test_every_worker_gets_the_same(built: Parts) -> None:
    again = Experiment.load(SMOKE).build()

    assert (again.train_samples, again.validation_samples) == (built.train_samples, built.validation_samples)
    for validation in (False, True):
        for one, other in zip(*(each.batch([0], validation=validation) for each in (again, built)), strict=True):
            assert torch.equal(one, other)
