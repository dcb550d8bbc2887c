"""What training relies on: two map-style datasets of (inputs, target), the same in every worker."""

import torch
from conftest import Built
from pipeline.config import components


def test_both_parts_have_samples(built: Built) -> None:
    assert len(built.train) > len(built.validation) > 0  # type: ignore[arg-type]


def test_samples_are_pairs_of_one_shape(built: Built) -> None:
    shapes = set()
    for dataset in (built.train, built.validation):
        for index in range(len(dataset)):  # type: ignore[arg-type]
            inputs, target = dataset[index]
            assert torch.isfinite(inputs).all()
            shapes.add((inputs.shape, target.shape, inputs.dtype, target.dtype))

    assert len(shapes) == 1


def test_targets_are_classes(built: Built) -> None:
    classes = built.experiment.metrics["accuracy"].arguments["num_classes"]
    for index in range(len(built.train)):  # type: ignore[arg-type]
        _, target = built.train[index]
        assert 0 <= int(target.min()) <= int(target.max()) < classes


def test_every_worker_gets_the_same(built: Built) -> None:
    allowed = components.allowed_packages()
    _, validation = components.build(built.experiment.data, key="data", allowed=allowed)

    assert len(validation) == len(built.validation)  # type: ignore[arg-type]
    for one, other in zip(validation[0], built.validation[0], strict=True):
        assert torch.equal(one, other)
