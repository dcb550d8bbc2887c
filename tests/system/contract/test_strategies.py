"""What every strategy holds to, old or new: on the same global batches it reaches the weights of a loop by hand.

Options that lose bits of the gradients on purpose come close to that instead.
"""

# promise: every strategy reaches the weights of `single`, options included

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import toys
from by_hand import CASES, Trained, train_by_hand
from ranks import Ranks

from pipeline import registry
from pipeline.protocol.trial import Rank
from pipeline.train.build import build
from pipeline.train.names import shown
from pipeline.train.ranks import whole
from pipeline.train.run import complete
from pipeline.train.state import State

NAMES = registry.names("strategies")
MANY = [name for name in NAMES if registry.load("strategies", name).Strategy.processes == "many"]
TOLERANCE = 1e-12
TRAINED = (
    "plain", "one sample left", "accumulation", "clipping", "weights and ignored labels", "learned scalar", "averages",
)  # fmt: skip
"""Cases of `by_hand`; test_by_hand.py trains all of them with ddp and fsdp."""

Weights = dict[str, torch.Tensor]


def weights_of(s: State) -> Weights:
    return {shown(name): whole(one.detach()).clone() for name, one in s.trainee.named_parameters()}


def train(rank: Rank, name: str, strategy: str) -> Weights:
    s = build(CASES[name].trial(strategy), rank=rank)
    complete(s)
    return weights_of(s)


def distance(one: Weights, other: Weights) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture(scope="module")
def expected() -> dict[str, Trained]:
    return {name: train_by_hand(CASES[name]) for name in TRAINED}


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[int, Ranks]]:
    with Ranks(1) as one, Ranks(2) as two:
        yield {1: one, 2: two}


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize(("strategy", "processes"), [*((one, 1) for one in NAMES), *((one, 2) for one in MANY)])
def test_it_reaches_the_weights_by_hand(
    ranks: dict[int, Ranks], expected: dict[str, Trained], strategy: str, processes: int, name: str
) -> None:
    for weights in ranks[processes].call(train, name, strategy):
        assert distance(weights, expected[name].weights) <= TOLERANCE


def test_the_cases_train_something_and_differ(expected: dict[str, Trained]) -> None:
    """Equal weights would mean nothing if training didn't move them, or if a case changed nothing."""
    plain = expected["plain"].weights
    assert distance(plain, expected["accumulation"].weights) <= TOLERANCE  # by definition
    for name in ("one sample left", "clipping", "weights and ignored labels"):
        assert distance(plain, expected[name].weights) > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_options_and_docstrings_are_there_for_people_and_the_plan(name: str) -> None:
    module = registry.load("strategies", name)
    strategy: Any = module.Strategy
    options = strategy.Options()
    assert strategy.Options.model_validate_json(options.model_dump_json()) == options
    assert [field for field, info in strategy.Options.model_fields.items() if not info.description] == []
    with pytest.raises(ValueError, match="no_such_option"):
        strategy.Options.model_validate({"no_such_option": 1})
    assert len(module.__doc__) > 30
    assert strategy.processes in ("one", "many")
    assert strategy.devices in ("one", "all")
    assert strategy.needs_process_group or strategy.processes == "one"
    assert strategy.refuse(options, device="cpu") is None


# ddp


@pytest.mark.parametrize(
    ("options", "remedy"), [({"sync_batch_norm": True}, "remove it"), ({"communication_hook": "bf16"}, "use fp16")]
)
def test_ddp_refuses_on_cpu_what_needs_gpus(options: dict[str, Any], remedy: str) -> None:
    strategy: Any = registry.load("strategies", "ddp").Strategy
    assert remedy in (strategy.refuse(strategy.Options(**options), device="cpu") or "")
    assert strategy.refuse(strategy.Options(**options), device="cuda") is None


EXACT_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "static_graph": {"static_graph": True},
    "no views": {"gradient_as_bucket_view": False},
    "unused": {"find_unused_parameters": True},
}
OPTIONS = EXACT_OPTIONS | {"fp16": {"communication_hook": "fp16"}}
"""ddp's options, by name; the communication hook loses bits."""
BATCHES = {"one sample left": {"global_batch_size": 7}, "accumulation": {"gradient_accumulation": 3}}
LARGE = {"_target_": "pipeline.models.MLP", "in_features": 3, "hidden": [400, 400], "num_classes": 1}
"""1.2 MiB of gradients in fp64, so that there are two buckets."""

Reached = dict[tuple[str, str], list[Weights]]


def take_steps(rank: Rank) -> dict[tuple[str, str], Weights]:
    """Weights by option and batches; "start" are those of a training without learning."""
    found = {}
    for name in ("start", *OPTIONS):
        for of, batches in BATCHES.items():
            optimizer = {"_target_": "torch.optim.SGD", "lr": 0.0 if name == "start" else 0.05}
            sections = {"model": LARGE, "optimizer": optimizer, "train": {"epochs": 1, **batches}}
            options = {**OPTIONS.get(name, {}), "bucket_cap_mb": 1}
            s = toys.built(rank=rank, strategy="ddp", options=options, **sections)
            stream = s.batches.stream(0, last_step=s.steps)
            for step in range(s.steps):
                s.train_step(s, stream, step=step)
            found[name, of] = weights_of(s)
    return found


@pytest.fixture(scope="module")
def reached(ranks: dict[int, Ranks]) -> Reached:
    own, other = ranks[2].call(take_steps)
    return {key: [own[key], other[key]] for key in own}


@pytest.mark.parametrize("of", BATCHES)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_change_nothing_but_fp16_rounds(reached: Reached, name: str, of: str) -> None:
    """Each step's rounding is half a bit of 11, and the steps' errors may add up to a few times that."""
    (own, other), plain = reached[name, of], reached["default", of][0]
    moved = distance(plain, reached["start", of][0])
    assert distance(own, other) == 0
    assert moved > 1e-2
    if name in EXACT_OPTIONS:
        assert distance(own, plain) <= TOLERANCE
    else:
        assert 0 < distance(own, plain) < 10 * 2**-11 * moved
