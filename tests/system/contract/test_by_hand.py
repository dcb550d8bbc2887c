"""Every training equals a loop by hand in plain torch, at 1, 2 and 3 ranks: losses, weights and validation."""

# promise: losses and weights equal plain torch in fp64 to 1e-12, however the global batch is divided
# promise: losses weighted by tokens or class weights; other losses are refused

from collections.abc import Iterator

import pytest
import torch
from by_hand import CASES, Trained, train_by_hand
from ranks import Ranks
from toys import Kept

from pipeline.protocol.events import Metrics
from pipeline.protocol.trial import Rank
from pipeline.train.build import build
from pipeline.train.names import shown
from pipeline.train.ranks import whole
from pipeline.train.run import complete

TOLERANCE, OF_METRICS = 1e-12, 1e-6  # torchmetrics computes in fp32
HOW = {"fsdp": 2, "ddp": 3}  # Ranks of each strategy; ddp with two is in test_strategies.py


def train(rank: Rank, name: str, strategy: str) -> Trained:
    outbox = Kept()
    s = build(CASES[name].trial(strategy), rank=rank, outbox=outbox)
    complete(s)
    points = {p.name: p.value for event in outbox.events if isinstance(event, Metrics) for p in event.points}
    weights = {shown(name): whole(one.detach()).clone() for name, one in s.trainee.named_parameters()}
    return Trained(outbox.series("train/loss"), weights, points)


def assert_same(found: Trained, expected: Trained) -> None:
    assert len(found.losses) == len(expected.losses) > 5
    assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE, abs=TOLERANCE)
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=TOLERANCE, atol=TOLERANCE, msg=name)
    for name, value in expected.values.items():
        tolerance = TOLERANCE if name.endswith(("/loss", "/offset", "/far")) else OF_METRICS
        assert found.values[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name


@pytest.fixture(scope="module")
def expected() -> dict[str, Trained]:
    return {name: train_by_hand(case) for name, case in CASES.items()}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "single" in case.only])
def test_one_process(expected: dict[str, Trained], name: str) -> None:
    assert_same(train(Rank(), name, "single"), expected[name])


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[int, Ranks]]:
    with Ranks(2) as two, Ranks(3) as three:
        yield {2: two, 3: three}


@pytest.mark.parametrize(
    ("strategy", "name"), [(one, name) for one in HOW for name, case in CASES.items() if one in case.only]
)
def test_ranks(ranks: dict[int, Ranks], expected: dict[str, Trained], strategy: str, name: str) -> None:
    for number, found in enumerate(ranks[HOW[strategy]].call(train, name, strategy)):
        if number:
            found.losses, found.values = expected[name].losses, expected[name].values  # which rank 0 reports
        assert_same(found, expected[name])


def test_the_losses_fall(expected: dict[str, Trained]) -> None:
    """Equal losses would mean little if they were flat."""
    assert all(len(set(one.losses)) > 5 for one in expected.values())
    assert 0.0 in expected["hardly any tokens"].losses
    assert {"train/offset", "validation/far"} < expected["boxes"].values.keys()
