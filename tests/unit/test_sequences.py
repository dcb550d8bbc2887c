"""Truncated backpropagation through time: rows continue from batch to batch, with their state, at any world size."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import samples
import torch
import toy_sequences
import toys
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from pipeline.config.load import from_mapping
from pipeline.driver import preflight
from pipeline.errors import ExperimentError
from pipeline.protocol.events import Warned
from pipeline.protocol.trial import Rank
from pipeline.training import loop
from pipeline.training.carried_state import CarriedState, _dealt_back
from pipeline.training.checkpoints.manifest import folder_name
from pipeline.training.coupling import layers
from pipeline.training.loop import train
from pipeline.training.order import ContiguousOrder, MicroBatch, mix

ROWS, STEPS = 4, 6
"""Streams, and chunks of each: two of 26 are left over."""
SECTIONS: dict[str, Any] = {
    "model": {"_target_": "toy_sequences.Net"},
    "data": {"_target_": "toy_sequences.text"},
    "loss": None,
    "task": {"_target_": "pipeline.tasks.RecurrentLanguageModel"},
    "order": {"contiguous": True},
}
TRAIN = {"global_batch_size": ROWS, "evaluate_every_steps": 4, "clip_grad_norm": 0.5}


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip what is measured behind the last step: it takes ten times as long as the training of a toy."""
    monkeypatch.setattr(loop, "probe", lambda context, **_: samples.parts(step_ms=5.0))


def trained(train: dict[str, Any] | None = None, **sections: Any) -> toys.Kept:
    return toys.trained(**SECTIONS | sections, train=TRAIN | (train or {}))[1]


def by_hand(epochs: int = 2) -> tuple[list[float], list[float]]:
    """Losses of each step and of the evaluations after steps 4, 8 and 12, of a loop in plain torch."""
    training, validation = toy_sequences.text()
    assert validation is not None
    torch.manual_seed(mix(3, "model"))
    model = toy_sequences.Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    streams = [part[: ROWS * STEPS].view(ROWS, STEPS, -1) for part in training.tensors]
    losses, evaluated = [], []
    for epoch in range(epochs):
        state = None
        for step in range(STEPS):
            tokens, targets = (part[:, step] for part in streams)
            logits, state = model(tokens, _detached(state))
            loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if (epoch * STEPS + step + 1) % 4 == 0:
                evaluated.append(_evaluated(model, *validation.tensors))
    return losses, evaluated


def _detached(state: Any) -> Any:
    return state and {"lower": tuple(one.detach() for one in state["lower"]), "upper": [state["upper"][0].detach()]}


@torch.no_grad()
def _evaluated(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> float:
    """Mean over all tokens of a set in as many streams, the last one shorter."""
    total = 0.0
    for rows, aims in zip(tokens.split(3), targets.split(3), strict=True):  # 11 chunks: 3, 3, 3 and 2
        logits, _ = model(rows.reshape(1, -1))
        total += cross_entropy(logits[0], aims.reshape(-1)).item() * len(rows)
    return total / len(tokens)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_losses_are_those_of_a_loop_in_plain_torch(accumulation: int) -> None:
    kept = trained({"gradient_accumulation": accumulation})
    losses, evaluated = by_hand()
    assert kept.series("train/loss") == pytest.approx(losses, rel=1e-12)
    assert kept.series("validation/loss") == pytest.approx(evaluated, rel=1e-12)


def test_a_state_with_its_rows_first_is_carried_as_well() -> None:
    sections = {"model": {"_target_": "torch.nn.Linear", "in_features": 4, "out_features": toy_sequences.TOKENS}}
    losses = [
        trained({"gradient_accumulation": parts, "clip_grad_norm": None}, **sections, task=task).series("train/loss")
        for parts, task in (
            (1, {"_target_": "toy_sequences.BatchFirst"}),
            (2, {"_target_": "toy_sequences.BatchFirst"}),
        )
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


# Order


@given(samples=st.integers(1, 60), rows=st.integers(1, 9), world_size=st.integers(1, 5), accumulation=st.integers(1, 3))
def test_an_evaluation_reads_each_chunk_once_after_the_one_before(
    samples: int, rows: int, world_size: int, accumulation: int
) -> None:
    order = ContiguousOrder(samples=rows, global_batch_size=rows, seed=0, in_set=rows)
    seen = list[int]()
    passes = []
    for rank in range(min(world_size, rows)):
        own = list(
            order.evaluation_micro_batches(
                samples, rank=rank, world_size=min(world_size, rows), accumulation=accumulation
            )
        )
        passes.append(len(own))
        before: list[int] = []
        for micro_batch in own:
            begins = micro_batch.indices[0] % order.stream_length(samples) == 0
            assert begins or micro_batch.indices == [index + 1 for index in before[: len(micro_batch.indices)]]
            before = micro_batch.indices
            seen += before
    assert sorted(seen) == list(range(samples))
    assert passes[0] == max(passes)  # a sharded strategy pads the others to as many


@given(samples=st.integers(1, 60), rows=st.integers(1, 9))
def test_each_row_continues_the_row_of_the_batch_before(samples: int, rows: int) -> None:
    if samples < rows:
        with pytest.raises(ExperimentError, match=rf"is {rows}, as many streams, .* has {samples} samples; write at m"):
            ContiguousOrder.of(samples, global_batch_size=rows, seed=0)
        return
    order = ContiguousOrder.of(samples, global_batch_size=rows, seed=0)
    batches = [order.global_batch(epoch, step) for epoch in range(2) for step in range(order.steps_per_epoch)]
    assert batches[: order.steps_per_epoch] == batches[order.steps_per_epoch :]
    assert all(len(batch) == rows for batch in batches)
    for step in range(1, order.steps_per_epoch):
        assert batches[step] == [index + 1 for index in batches[step - 1]]
    assert order.set_size == samples
    assert samples - order.samples < rows


# State


@given(rows=st.integers(1, 9), dim=st.integers(0, 2), ranks=st.integers(1, 5))
def test_rows_return_to_the_ranks_of_another_world_size(rows: int, dim: int, ranks: int) -> None:
    shape = [2, 3, 4]
    shape[dim] = rows
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    saved = {"next": [1, 2], "rows": [(whole,)]}
    parts = []
    for rank in range(min(ranks, rows)):
        carried = CarriedState(batch_dim=dim, stream_length=5)
        carried.load(saved, rank=Rank(rank=rank, world_size=min(ranks, rows)), device=torch.device("cpu"))
        count = len(range(rank, rows, min(ranks, rows)))
        (part,) = carried.of(MicroBatch(1, [5 * row + 2 for row in range(count)], weight=1.0, is_last=True))
        parts.append(part)
    assert torch.equal(_dealt_back(tuple(parts), dim=dim), whole)


def test_a_resumed_training_continues_with_the_state_of_its_rows(tmp_path: Path) -> None:
    def run(name: str, *, resume: bool = False) -> toys.Kept:
        trial = toys.trial(**SECTIONS, checkpoint={"every_steps": 100 if resume else 1, "keep": 100}, train=TRAIN)
        kept = toys.Kept()
        update = {"checkpoints": str(tmp_path / name), "resume": resume}
        train(trial.model_copy(update=update), rank=Rank(), outbox=kept)
        return kept

    whole = run("whole").series("train/loss")
    for stopped in (6, 7):  # at the end of an epoch, within the second one
        name = f"from {stopped}"
        shutil.copytree(tmp_path / "whole" / folder_name(stopped), tmp_path / name / folder_name(stopped))
        again = run(name, resume=True)
        assert [point.value for point in again.points("train/loss") if point.step > stopped] == whole[stopped:]
        assert not [event for event in again.events if isinstance(event, Warned)]
        last = (tmp_path / place / folder_name(12) / "state.safetensors" for place in ("whole", name))
        assert len({path.read_bytes() for path in last}) == 1


def test_the_state_of_a_skipped_step_is_left_out_too() -> None:
    kept = trained({"on_nonfinite": "skip", "log_every_steps": 1}, task={"_target_": "toy_sequences.Infinite", "at": 3})
    assert kept.series("train/skipped_steps")[-1] == 1
    assert all(torch.tensor(kept.series("validation/loss")).isfinite())
    finite = [math.isfinite(loss) for loss in kept.series("train/loss")]
    assert finite == [step != 2 for step in range(12)]


def test_dropout_within_recurrent_layers_is_told_as_another_training() -> None:
    assert layers(toy_sequences.Net(dropout=0.5)) == ("Dropout of LSTM",)
    assert layers(toy_sequences.Net()) == ()


# Errors


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"order": None},
            "order: is missing, so samples are shuffled, but the task carries a state from batch to batch",
        ),
        ({"order": {"bucket_by": "length"}}, "order: is by bucket_by, but the task carries a state"),
        ({"compare": [{"strategy": "dp"}]}, r"compare\[0\].strategy: is dp, which splits every tensor at its first"),
        ({"train": {"global_batch_size": 27}}, "train.global_batch_size: is 27, as many streams, but the training set"),
        (
            {"task": {"_target_": "toy_sequences.Gathering"}},
            "task: carries a state from batch to batch and calls pipeline",
        ),
        ({"task": {"_target_": "toy_sequences.Undeclared"}}, "task: returns StepOutput.state, but has no batch_dim"),
    ],
)
def test_what_does_not_go_with_a_state_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        trained(sections.get("train"), **{key: value for key, value in sections.items() if key != "train"})


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("nothing", "StepOutput.state is or holds a NoneType; return a tensor, or tuples"),
        ("numbers", r"a StepOutput.state of shape \(\) for a batch of 4 rows; dimension 1, its batch_dim, must"),
        ("one row", r"a StepOutput.state of shape \(2, 1\) for a batch of 4 rows"),
        ("scalar", r"a StepOutput.state of shape \(\) for a batch of 4 rows"),
    ],
)
def test_a_state_that_does_not_count_the_rows_is_refused(what: str, message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        trained(task={"_target_": "toy_sequences.Returns", "what": what})


def test_a_shuffle_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "allowed_packages", lambda: ("torch", "pipeline", "toys", "toy_sequences"))
    declared = toys.experiment(**SECTIONS | {"order": None}).model_dump(mode="json", exclude_defaults=True)
    with pytest.raises(ExperimentError, match=r"order: is missing, so samples are shuffled, but the task carries"):
        preflight.check(from_mapping(declared))
