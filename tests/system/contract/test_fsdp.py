"""fsdp in two processes over gloo: its options, mixed precision, what a rank holds, checkpoints of other strategies.

test_by_hand.py trains with its defaults.
"""

# promise: every strategy reaches the weights of `single`, options included

import math
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import toys
from ranks import Ranks
from safetensors import safe_open
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from pipeline.protocol.events import Resumed
from pipeline.protocol.trial import Rank
from pipeline.protocol.trial_result import Held
from pipeline.train.evaluate import evaluate, full_state_dict
from pipeline.train.kept import compute_gradients
from pipeline.train.ranks import local
from pipeline.train.state import State
from pipeline.train.storage import folder_name

ROUNDED = 1e-12
LARGE: dict[str, Any] = {
    "model": {"_target_": "pipeline.models.MLP", "in_features": 3, "hidden": [40, 40], "num_classes": 1},
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.05, "momentum": 0.9},
}
"""Three groups and a rest that is empty."""
WORK: dict[str, dict[str, Any]] = {
    "one sample left": {"train": {"global_batch_size": 7}},
    "unequal micro-batches": {"train": {"global_batch_size": 7, "gradient_accumulation": 3}},  # of 4 and of 3 samples
    "skipped": {"data": {"_target_": "toys.nudged", "by": math.inf}, "train": {"on_nonfinite": "skip"}},
    "clipped": {"train": {"gradient_accumulation": 2, "clip_grad_norm": 0.05}},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "one group": {"groups": "none"},
    "kept": {"reshard_after_forward": False},
    "let go": {"reshard_after_forward": True},
    "reduced each time": {"reduce_each_micro_batch": True},
    **(
        {"zeros": {"zero_unused_gradients": True, "groups": "none"}}
        if hasattr(FSDPModule, "set_reduce_scatter_unused_params")
        else {}
    ),
}

Weights = dict[str, Tensor]


def steps(rank: Rank, sections: dict[str, Any], options: Mapping[str, Any] = {}, strategy: str = "fsdp") -> State:
    s = toys.built(rank=rank, strategy=strategy, options=options, **LARGE | sections)
    stream = s.batches.stream(0, last_step=s.order.steps_per_epoch)
    for step in range(s.order.steps_per_epoch):
        s.train_step(s, stream, step=step)
    return s


def weights(rank: Rank, *given: Any) -> Weights:
    return dict(full_state_dict(steps(rank, *given)))


def distance(one: Weights, other: Weights) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture(scope="module")
def expected() -> dict[str, Weights]:
    """Weights of one process, by kind of work."""
    return {work: weights(Rank(), sections, {}, "single") for work, sections in WORK.items()}


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_change_no_weights(ranks: Ranks, expected: dict[str, Weights], name: str, work: str) -> None:
    assert distance(ranks.call(weights, WORK[work], OPTIONS[name])[0], expected[work]) <= ROUNDED


def test_the_work_differs(expected: dict[str, Weights]) -> None:
    assert distance(expected["one sample left"], expected["unequal micro-batches"]) <= ROUNDED  # by definition
    for work in ("clipped", "skipped"):
        assert distance(expected["one sample left"], expected[work]) > 1e-4


def measure_in_between(rank: Rank) -> Weights:
    """A step; then what one rank does without the other, which must not wait or leave a trace; then the other steps."""
    s = toys.built(rank=rank, strategy="fsdp", **LARGE | WORK["one sample left"])
    stream = s.batches.stream(0, last_step=s.order.steps_per_epoch)
    s.train_step(s, stream, step=0)
    if rank.is_first:
        for _ in range(2):
            compute_gradients(s, s.batches.stream(0, last_step=1), exchange=False)
        with suppress(MemoryError), s.strategy.no_communication(s.wrapped):
            s.wrapped((torch.zeros(2, 3).double(), torch.zeros(2, 1).double()))
            raise MemoryError
    dist.barrier()
    for step in range(1, s.order.steps_per_epoch):
        s.train_step(s, stream, step=step)
    return dict(full_state_dict(s))


def test_a_rank_alone_waits_for_no_other_and_leaves_no_trace(ranks: Ranks, expected: dict[str, Weights]) -> None:
    assert distance(ranks.call(measure_in_between)[0], expected["one sample left"]) <= ROUNDED


NORMED = {"model": {"_target_": "toys.batch_norm_net"}}


CLASSES = {
    "data": {"_target_": "toys.classification"}, "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.01},
}  # fmt: skip


def reached(rank: Rank, strategy: str, precision: str, normed: bool) -> Weights:
    net = {"_target_": "toys.NormedNet", "outputs": 3} if normed else {**LARGE["model"], "num_classes": 3}
    sections = {**CLASSES, "model": net, "train": {"precision": precision}}
    s = steps(rank, sections, {}, strategy)
    assert {parameter.dtype for parameter in s.model.parameters()} == {torch.float32}
    seen: list[torch.dtype] = []
    s.model.register_forward_hook(lambda _, __, outputs: seen.append(outputs.dtype))
    s.wrapped((torch.zeros(2, 3), torch.tensor([0, 1]))).sum.backward()
    assert seen == [torch.float32] or strategy == "ddp"  # so the task computes in full precision
    return dict(full_state_dict(s))


@pytest.mark.parametrize("normed", [False, True])
def test_half_precision_is_off_by_its_rounding(ranks: Ranks, normed: bool) -> None:
    exact = ranks.call(reached, "fsdp", "fp32", normed)[0]
    assert distance(exact, ranks.call(reached, "ddp", "fp32", normed)[0]) < 1e-5
    for precision in ("bf16", "fp16"):
        own, autocast = (ranks.call(reached, strategy, precision, normed)[0] for strategy in ("fsdp", "ddp"))
        assert 0 < distance(own, exact) < 2e-2
        assert distance(own, autocast) < 2e-2


def shapes(rank: Rank, groups: str) -> list[tuple[int, ...]]:
    s = steps(rank, {}, {"groups": groups})
    evaluate(s)
    return [tuple(local(one).shape) for one in s.model.parameters()]


@pytest.mark.parametrize("groups", ["auto", "none"])
def test_a_rank_holds_its_part_even_after_evaluation(ranks: Ranks, groups: str) -> None:
    own, other = ranks.call(shapes, groups)
    assert own == [(20, 3), (20,), (20, 40), (20,), (1, 40), (1,)]
    assert other == [(20, 3), (20,), (20, 40), (20,), (0, 40), (0,)]


def means(rank: Rank, share: Callable[[State], Any]) -> tuple[Tensor, Tensor, Weights]:
    s = steps(rank, NORMED)
    buffer = next(buffer for name, buffer in s.model.named_buffers() if name.endswith("running_mean"))
    own = buffer.clone()
    share(s)
    return own, buffer.clone(), dict(full_state_dict(s))


@pytest.mark.parametrize("share", [evaluate, full_state_dict])
def test_buffers_are_those_of_the_first_rank(ranks: Ranks, share: Callable[[State], Any]) -> None:
    (own, _, whole), (other, shared, _) = ranks.call(means, share)
    assert not torch.equal(own, other)
    assert torch.equal(shared, own)
    assert torch.equal(whole["1.running_mean"], own)


# Checkpoints

STEPS, STOPPED = 6, 4


def run(rank: Rank, folder: Path, strategy: str, resume: bool = False) -> tuple[toys.Kept, Held]:
    sections = {**LARGE, "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.01, "fused": False}}
    how = {"strategy": strategy, "checkpoints": str(folder), "resume": resume, "workers": rank.world_size}
    result, outbox = toys.trained(rank=rank, **how, **sections, checkpoint={"every_steps": 1, "keep": 100})
    assert result.held is not None
    return outbox, result.held


def stored(path: Path) -> int:
    """Bytes of all tensors in a file."""
    with safe_open(path, framework="pt") as file:
        return sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118 (no mapping)


def test_a_training_goes_on_under_another_strategy_and_no_rank_holds_the_whole(ranks: Ranks, tmp_path: Path) -> None:
    alone, whole = run(Rank(), tmp_path / "alone", "single")
    (sharded, held), _ = ranks.call(run, tmp_path / "fsdp", "fsdp")
    assert sharded.series("train/loss") == pytest.approx(alone.series("train/loss"), abs=ROUNDED)
    assert sum(held.mb) == pytest.approx(whole.mb[0], rel=0.01)  # but for numbers of steps, which all have
    assert max(held.mb) < 0.8 * whole.mb[0]
    assert (held.cut, whole.cut) == ("3 x Linear and all other parameters", "")
    parts = [stored(path) for path in (tmp_path / "fsdp" / folder_name(STEPS)).glob("*.safetensors")]
    assert len(parts) == 2
    assert max(parts) < 0.8 * sum(parts)

    source = "fsdp"
    for strategy in ("ddp", "fsdp"):
        target = tmp_path / f"{source} to {strategy}"
        shutil.copytree(tmp_path / source / folder_name(STOPPED), target / folder_name(STOPPED))
        (resumed, copied), _ = ranks.call(run, target, strategy, True)
        assert [event.step for event in resumed.events if isinstance(event, Resumed)] == [STOPPED]
        assert not resumed.warnings
        assert resumed.series("train/loss")[-2:] == pytest.approx(alone.series("train/loss")[-2:], abs=ROUNDED)
        assert distance(resumed.files["model/weights.pt"], alone.files["model/weights.pt"]) <= ROUNDED
        if strategy == "ddp":
            assert copied.mb == pytest.approx((whole.mb[0],) * 2)
        source = target.name
