"""fsdp in two processes over gloo: its options, mixed precision, uneven shares, checkpoints, and what a rank holds."""

# promise: every strategy reaches the weights of `single`, options included

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_trainings import events_of, lab_trial, saved_in, train_rank
from ranks import on_ranks
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from pipeline.protocol.events import (
    Event,
    Finished,
    Metrics,
    Resumed,
    Warned,
)
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Trial
from pipeline.training.build import build
from pipeline.training.checkpoints.manifest import folder_name
from pipeline.training.context import TrainContext
from pipeline.training.evaluation.held_out import evaluation_module, full_state_dict
from pipeline.training.ranks.collectives import from_first
from pipeline.training.ranks.norms import local
from pipeline.training.step import compute_gradients, train_step

ROUNDED = 1e-12
LARGE = "model={_target_: pipeline.models.MLP, in_features: 4, hidden: [40, 40], num_classes: 3}"
"""Three groups and a rest that is empty."""
WORK: dict[str, list[str]] = {
    "one sample left": ["train.global_batch_size=7"],
    "unequal micro-batches": ["train.global_batch_size=7", "train.gradient_accumulation=3"],  # of 4 and of 3 samples
    "skipped": ["data={_target_: lab.holed, index: 5}", "train.on_nonfinite=skip"],
    "clipped": ["train.gradient_accumulation=2", "train.clip_grad_norm=0.05"],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "one group": {"groups": "none"},
    "kept": {"reshard_after_forward": False},
    "let go": {"reshard_after_forward": True},
    "reduced each time": {"reduce_each_micro_batch": True},
    **({"zeros": {"zero_unused_gradients": True}} if hasattr(FSDPModule, "set_reduce_scatter_unused_params") else {}),
}
STOPPED = 3
"""Of eight steps, four in an epoch."""
UNEVEN = "data={_target_: lab.points, samples: 33}"
"""Of which rank 0 has a validation batch more than rank 1."""

Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def root(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Starting processes takes most of the time, so two of them do all there is to do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        patch.syspath_prepend(project)
        folder = tmp_path_factory.mktemp("fsdp")
        train_rank(_trial(folder, "alone", strategy="single"), Rank())
        on_ranks(_in_two_processes, folder, folder=folder)
        yield folder


def _in_two_processes(where: Rank, folder: Path) -> None:
    for work in WORK:
        for name, options in OPTIONS.items():
            _keep(_take_steps(_plain(work, options), where), folder / f"{name}, {work}", where)
    _keep(_measure_in_between(where), folder / "measured", where)
    _precisions(folder, where)
    _holds(folder, where)
    _buffers(folder, where)
    for name, more in _TRAININGS.items():
        train_rank(from_first(lambda: _trial(folder, name, **more), rank=where), where)  # noqa: B023


_TRAININGS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "fsdp to ddp": {"strategy": "ddp", "stopped": "fsdp"},
    "ddp to fsdp": {"stopped": "fsdp to ddp"},
}


def _plain(work: str, options: dict[str, Any], *more: str, strategy: str = "fsdp") -> Trial:
    overrides = ["train.precision=fp64", LARGE, "train.epochs=1", "optimizer.momentum=0.9", *WORK[work], *more]
    return lab_trial(overrides, strategy=strategy, options=options)


def _take_steps(trial: Trial, rank: Rank) -> TrainContext:
    context = build(trial, rank=rank)
    stream = context.batches.training(0)
    for step in range(context.order.steps_per_epoch):
        train_step(context, stream, step=step)
    return context


def _keep(context: TrainContext, path: Path, rank: Rank) -> None:
    weights = full_state_dict(context)
    if rank.is_first:
        torch.save(dict(weights), f"{path}.pt")


def _distance(one: Weights, other: Weights) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture(scope="module")
def expected(root: Path) -> dict[str, Weights]:
    """Weights of one process, by kind of work."""
    return {work: _take_steps(_plain(work, {}, strategy="single"), Rank()).model.state_dict() for work in WORK}


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_change_no_weights(root: Path, expected: dict[str, Weights], name: str, work: str) -> None:
    assert _distance(torch.load(root / f"{name}, {work}.pt"), expected[work]) <= ROUNDED


def test_the_work_differs(expected: dict[str, Weights]) -> None:
    assert _distance(expected["one sample left"], expected["unequal micro-batches"]) <= ROUNDED  # by definition
    for work in ("clipped", "skipped"):
        assert _distance(expected["one sample left"], expected[work]) > 1e-4


def _measure_in_between(rank: Rank) -> TrainContext:
    """A step; then what one rank does without the other, which must not wait or leave a trace; then the other steps."""
    context = build(_plain("one sample left", {}), rank=rank)
    stream = context.batches.training(0)
    train_step(context, stream, step=0)
    if rank.is_first:
        for _ in range(2):
            compute_gradients(context, context.batches.training(0), exchanges=False)
        assert context.sharded is not None
        with suppress(MemoryError), context.sharded.no_communication(context.wrapped):
            context.wrapped(torch.zeros(2, 4, dtype=torch.float64))
            raise MemoryError
    context.optimizer.zero_grad(set_to_none=True)
    dist.barrier()
    for step in range(1, context.order.steps_per_epoch):
        train_step(context, stream, step=step)
    return context


def test_a_rank_alone_waits_for_no_other_and_leaves_no_trace(root: Path, expected: dict[str, Weights]) -> None:
    assert _distance(torch.load(root / "measured.pt"), expected["one sample left"]) <= ROUNDED


NORMED = "model={_target_: lab.Normed}"
FIFTEEN = "train.global_batch_size=15"  # batch statistics need two samples on each rank


def _precisions(folder: Path, rank: Rank) -> None:
    for precision in ("bf16", "fp16", "fp32"):
        for strategy in ("fsdp", "ddp"):
            for model in (LARGE, NORMED):
                context = _take_steps(
                    lab_trial(
                        [f"train.precision={precision}", model, FIFTEEN, "train.epochs=1", "optimizer.lr=0.01"],
                        strategy=strategy,
                    ),
                    rank,
                )
                assert {parameter.dtype for parameter in context.model.parameters()} == {torch.float32}
                output = context.wrapped(torch.zeros(2, 4))
                assert output.dtype == (torch.float32 if strategy == "fsdp" else output.dtype)
                output.sum().backward()
                _keep(context, folder / f"{precision}, {strategy}, {model == NORMED}", rank)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_off_by_its_rounding(root: Path, precision: str, normed: bool) -> None:
    exact = torch.load(root / f"fp32, fsdp, {normed}.pt")
    own, autocast = (torch.load(root / f"{precision}, {strategy}, {normed}.pt") for strategy in ("fsdp", "ddp"))

    assert _distance(exact, torch.load(root / f"fp32, ddp, {normed}.pt")) < 1e-5
    assert 0 < _distance(own, exact) < 2e-2
    assert _distance(own, autocast) < 2e-2


def _holds(folder: Path, rank: Rank) -> None:
    context = _take_steps(_plain("one sample left", {}), rank)
    with torch.no_grad():
        evaluation_module(context)(torch.zeros(1, 4, dtype=torch.float64))
    torch.save([tuple(local(one).shape) for one in context.model.parameters()], folder / f"shapes {rank.rank}.pt")


def test_a_rank_holds_its_part_even_after_evaluation(root: Path) -> None:
    shapes = [torch.load(root / f"shapes {rank}.pt") for rank in range(2)]

    assert shapes[0] == [(20, 4), (20,), (20, 40), (20,), (2, 40), (2,)]
    assert shapes[1] == [(20, 4), (20,), (20, 40), (20,), (1, 40), (1,)]


def _buffers(folder: Path, rank: Rank) -> None:
    context = _take_steps(lab_trial([NORMED, FIFTEEN, "train.precision=fp64"], strategy="fsdp"), rank)
    own = next(module.running_mean.clone() for module in context.model.modules() if isinstance(module, nn.BatchNorm1d))
    torch.save(own, folder / f"mean {rank.rank}.pt")
    _keep(context, folder / "normed", rank)


def test_buffers_are_those_of_the_first_rank(root: Path) -> None:
    own, other = (torch.load(root / f"mean {rank}.pt") for rank in range(2))

    assert not torch.equal(own, other)
    assert torch.equal(torch.load(root / "normed.pt")["layers.0.running_mean"], own)


def _trial(folder: Path, name: str, *, strategy: str = "fsdp", stopped: str = "") -> Trial:
    """A trial with a checkpoint of each step; it goes on from what another one has left if that is given."""
    overrides = [
        "train.precision=fp64", "checkpoint.every_steps=1", "checkpoint.keep=100", UNEVEN,
        "train.global_batch_size=9", "optimizer._target_=torch.optim.AdamW",
        "metrics.accuracy={_target_: torchmetrics.classification.MulticlassAccuracy, num_classes: 3, average: micro}",
    ]  # fmt: skip
    return saved_in(folder, lab_trial(overrides, strategy=strategy, name=name), stopped=stopped, steps=STOPPED)


def _series(events: Sequence[Event], name: str, *, after: int = 0) -> dict[int, float]:
    points = [point for event in events if isinstance(event, Metrics) for point in event.points]
    return {point.step: point.value for point in points if point.name == name and point.step > after}


@pytest.mark.parametrize("name", ["train/loss", "validation/loss", "validation/accuracy"])
def test_losses_and_metrics_are_those_of_one_process(root: Path, name: str) -> None:
    own, expected = (_series(events_of(root, trial, Metrics), name) for trial in ("fsdp", "alone"))

    assert own.keys() == expected.keys() != set()
    assert max(abs(own[step] - expected[step]) for step in own) <= 1e-6  # metrics are fp32


@pytest.mark.parametrize("resumed", ["fsdp to ddp", "ddp to fsdp"])
def test_a_training_goes_on_under_another_strategy(root: Path, resumed: str) -> None:
    events = events_of(root, resumed, Event)
    whole = _series(events_of(root, "alone", Metrics), "train/loss")
    rest = _series(events, "train/loss", after=STOPPED)

    assert [event.step for event in events if isinstance(event, Resumed)] == [STOPPED]
    assert [event.message for event in events if isinstance(event, Warned)] == []
    assert list(rest) == list(range(STOPPED + 1, 9))
    assert max(abs(rest[step] - whole[step]) for step in rest) <= ROUNDED


@pytest.mark.parametrize("resumed", ["fsdp to ddp", "ddp to fsdp"])
def test_the_weights_in_the_end_are_the_same(root: Path, resumed: str) -> None:
    own, expected = (torch.load(f"{root}/{name}.0.weights.pt") for name in (resumed, "alone"))

    assert {type(value) for value in own.values()} == {Tensor}
    assert _distance(own, expected) <= ROUNDED


def _stored(path: Path) -> int:
    """Bytes of all tensors in a file."""
    with safe_open(path, framework="pt") as file:
        return sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118 (no mapping)


def test_no_rank_writes_the_whole(root: Path) -> None:
    (whole,) = (_stored(path) for path in (root / "alone" / folder_name(4)).glob("*.safetensors"))
    parts = [_stored(path) for path in (root / "fsdp" / folder_name(4)).glob("*.safetensors")]

    assert (len(parts), sum(parts)) == (2, whole)
    assert max(parts) < 0.8 * whole


def test_what_ranks_hold_is_in_the_result(root: Path) -> None:
    held = {name: events_of(root, name, Finished)[0].result.held
            for name in ("alone", "fsdp", "fsdp to ddp")}  # fmt: skip
    own, whole, copied = held["fsdp"], held["alone"], held["fsdp to ddp"]

    assert own is not None and whole is not None and copied is not None  # noqa: PT018
    steps = 2 * 4  # two tensors of one fp32, whole on each rank
    assert sum(own.mb) * 2**20 - 2 * steps == pytest.approx(whole.mb[0] * 2**20 - steps)
    assert max(own.mb) < 0.8 * whole.mb[0]
    assert copied.mb == (whole.mb[0], whole.mb[0])
    assert (own.cut, whole.cut) == ("all parameters in one group", "")
