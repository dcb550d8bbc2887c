"""Iterable datasets: the batches of their order, validation whole, resumed by state or by reading again.

What a stream can't do is refused: test_training_errors.py.
"""

# promise: iterable datasets: indexed samples in this order, 1 and 2 workers, resumed by state or by reading again

from pathlib import Path
from typing import Any

import checkpointed
import pytest
import samples
import toy_streams
import toys
from checkpointed import EVERY, until
from hypothesis import given, settings
from hypothesis import strategies as st
from loading import epoch_of

from pipeline.drive import preflight
from pipeline.plan.plan import describe, make_plan
from pipeline.plan.resources import Resources
from pipeline.train import measure
from pipeline.train.iterable import IterableLoader
from pipeline.train.order import SampleOrder, evaluation_batches
from pipeline.train.reader import Collation

ENDLESS = {"epochs": None, "steps": 9, "global_batch_size": 8}


def data(kind: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": "toy_streams.stream", "kind": kind, **arguments}


def losses(kept: toys.Kept, *, after: int = 0, name: str = "train/loss") -> list[float]:
    return [point.value for point in kept.points(name) if point.step > after]


def test_a_stream_trains_what_samples_in_this_order_train() -> None:
    """At each sample once in an epoch, the last batch smaller, each sample of the validation set counted once."""
    streamed = toys.trained(data=data("Sized", validation=True))[1]
    by_index = toys.trained(sampler={"_target_": "toy_streams.in_order"})[1]
    assert losses(streamed) == losses(by_index)
    assert losses(streamed, name="validation/loss") == losses(by_index, name="validation/loss")
    assert len(losses(streamed)) == 6


def test_a_stream_without_a_length_is_read_again_from_its_end() -> None:
    """Nine steps of eight samples are three times 22 samples, and six."""
    streamed = toys.trained(data=data("Plain"), train=ENDLESS)[1]
    repeated = {"_target_": "toys.given", "indices": [index % 22 for index in range(72)]}
    by_index = toys.trained(data={"_target_": "toys.regression", "validation": 0}, sampler=repeated, train=ENDLESS)[1]
    assert losses(streamed) == losses(by_index)


# Resumed


def run(folder: Path, kind: str, **more: Any) -> toys.Kept:
    has_length = issubclass(getattr(toy_streams, kind), toy_streams.Sized)
    sections: dict[str, Any] = {} if has_length else {"train": ENDLESS}
    return checkpointed.run(folder, data=data(kind), **EVERY, **sections, **more)


def continued(root: Path, kind: str, *, stopped: int, **more: Any) -> tuple[list[float], list[str]]:
    """Losses of a training that was resumed from a checkpoint of the one in ``root / "whole"``, and its warnings."""
    left = until(stopped, folder=root / "whole", to=root / str(stopped))
    again = run(left, kind, resume=True, **more)
    return losses(again, after=stopped), again.warnings


@pytest.mark.parametrize("kind", ["Plain", "Stateful", "Code", "Demanding", "Shuffled"])
def test_a_training_resumed_after_any_step_is_the_same(tmp_path: Path, kind: str) -> None:
    """After the first one, at the end of an epoch or just after the end of a pass, and within the second one."""
    whole = run(tmp_path / "whole", kind)
    for stopped in (1, 3, 5):
        assert continued(tmp_path, kind, stopped=stopped) == (losses(whole, after=stopped), [])


def test_a_stream_with_a_state_is_not_read_from_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "probe", lambda s, **_: samples.parts(step_ms=5.0))
    run(tmp_path / "whole", "Stateful")
    toy_streams.Stateful.read = 0
    continued(tmp_path, "Stateful", stopped=7, train_only=False)
    # the first sixteen to look at, eight to compare, sixteen to train on, eight to measure a step behind the last
    assert toy_streams.Stateful.read == 16 + 8 + 16 + 8


@pytest.mark.parametrize(
    ("kind", "stopped", "said"),
    [
        ("Buffered", 5, "does not restore its position exactly"),  # its state lacks the shuffle buffer
        ("Unseeded", 2, "returned different samples after resuming"),
    ],
)
def test_a_stream_that_can_not_continue_exactly_is_told(tmp_path: Path, kind: str, stopped: int, said: str) -> None:
    whole = losses(run(tmp_path / "whole", kind), after=stopped)
    again, warnings = continued(tmp_path, kind, stopped=stopped)
    assert said in warnings[-1]
    assert (again == whole) == (kind == "Buffered")


# Loader


@settings(max_examples=30, deadline=None)
@given(
    length=st.integers(1, 40), batch=st.integers(1, 9), world_size=st.integers(1, 5), accumulation=st.integers(1, 3),
    is_equal=st.booleans(),
)  # fmt: skip
def test_each_rank_takes_its_share_of_the_same_batches(
    length: int, batch: int, world_size: int, accumulation: int, is_equal: bool
) -> None:
    world_size = min(world_size, batch)
    order = SampleOrder(samples=length, set_size=length, global_batch_size=batch, seed=0, is_stream=True)
    seen, held_out = list[int](), list[int]()
    for rank in range(world_size):
        loader = _loader(length, block=batch)
        loader.read([0, 3])
        how = {"world_size": world_size, "accumulation": accumulation, "is_equal": is_equal}
        for part, taken in loader.batches(epoch_of(order, rank=rank, **how)):
            if part.weight:
                assert taken.tolist() == part.indices
                seen += part.indices
        loader = _loader(length, block=None)
        for _ in range(2):
            parts = evaluation_batches(length, accumulation, rank=rank, world_size=world_size)
            found = [index for _, samples in loader.batches(parts) for index in samples.tolist()]
        held_out += found
    assert sorted(seen) == sorted(held_out) == list(range(length))


def _loader(length: int, *, block: int | None) -> IterableLoader:
    return IterableLoader(
        _Numbers(length), what="training", samples=length, block=block, seed=0, collate=Collation(), pin_memory=False
    )


class _Numbers(toys.SizedStream):
    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Any:
        return iter(range(self._length))

    def __len__(self) -> int:
        return self._length


# Plan


@pytest.mark.parametrize(
    ("kind", "train", "expected"),
    [
        ("Sized", {}, ["train_samples: 22 validation_samples: 10", "total_steps: 6 epochs: 2", "reads the dataset ag"]),
        ("Stateful", ENDLESS, [
            "no GPU validation_samples: 10", "total_steps: 9 steps: 9 global_batch_size: 8",
            "restores the dataset's state_dict", "Validation runs only when training ends; set train.evaluate",
            "A checkpoint is saved only when training ends; set checkpoint.every_steps",
        ]),
    ],
)  # fmt: skip
def test_the_plan_says_what_is_promised(kind: str, train: dict[str, Any], expected: list[str]) -> None:
    experiment = toys.experiment(data=data(kind, validation=True), train=train)
    sizes = preflight.data_sizes(experiment, allowed=("torch", "toy_streams"))
    plan = make_plan(experiment, Resources(cpus=2, memory_mb=1000), with_baseline=False)
    text = " ".join(describe(plan, sizes).split())
    assert all(part in text for part in expected), text
    assert "does not depend on the number of workers if each process reads the same samples" in text
