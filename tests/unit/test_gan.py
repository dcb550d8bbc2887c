"""Parts of dcgan.yaml: noise of each sample, generator and discriminator, and their quick training."""

from pathlib import Path
from typing import Any

import pytest
import torch
import toys

from pipeline.config.load import load
from pipeline.config.targets import BUILT_IN
from pipeline.data import digits, with_noise
from pipeline.errors import ExperimentError
from pipeline.models import DCGAN
from pipeline.protocol.trial import Rank, Training
from pipeline.training.loop import train
from pipeline.training.order import MicroBatch
from pipeline.training.readers import fetcher

ROOT = Path(__file__).parents[2]


def test_noise_follows_from_seed_epoch_and_sample() -> None:
    dataset: Any = with_noise(digits(value_range=(-1, 1)), size=5)[0]
    read = fetcher(dataset, collate=None, seed=3)

    def batch(*indices: int, epoch: int = 0) -> Any:
        return read.__getitems__(MicroBatch(epoch, list(indices), weight=1.0, is_last=True))

    noise, images = batch(7, 1, 4)
    assert (noise.shape, images.shape) == ((3, 5), (3, 1, 8, 8))
    assert (float(images.min()), float(images.max())) == (-1, 1)
    assert torch.equal(batch(4)[0][0], noise[2])
    assert not torch.equal(batch(4, epoch=1)[0][0], noise[2])


def test_a_generator_makes_images_that_its_discriminator_judges() -> None:
    model = DCGAN(noise=5, image_size=32, channels=3, width=4)
    images = model(torch.randn(2, 5))
    assert images.shape == (2, 3, 32, 32)
    assert float(images.detach().abs().max()) < 1
    assert model.discriminator(images).shape == (2, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image_size": 12}, r"model\.image_size: is 12; write a power of 2 of at least 8"),
        ({"width": 6}, r"model\.width: is 6; write a multiple of 4"),
    ],
)
def test_a_size_that_cannot_be_built_is_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        DCGAN(**arguments)


def test_noise_of_nothing_is_refused() -> None:
    with pytest.raises(ExperimentError, match=r"data\.of: is a list; name a data function"):
        with_noise([], size=2)
    with pytest.raises(ExperimentError, match=r"data\.size: is 0; write the numbers of noise"):
        with_noise(digits(), size=0)


def test_dcgan_tries_itself_and_shows_what_it_generates() -> None:
    experiment = load(ROOT / "experiments" / "dcgan.yaml", ["tracking.log_model=false", "model.width=4"]).experiment
    trial = Training(
        name="main", experiment=experiment, strategy="single", launcher="inprocess", workers=1, devices_per_worker=0,
        device="cpu", cpus_per_worker=1, allowed=BUILT_IN, is_quick=True, train_only=True,
    )  # fmt: skip
    kept = toys.Kept()
    assert train(trial, rank=Rank(), outbox=kept).steps == 2
    assert 0 <= kept.series("validation/accuracy")[0] <= 1
    assert [name for name in kept.files if name.startswith("samples/")] == ["samples/generated-000002.png"]
