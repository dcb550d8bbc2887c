"""fsdp through the commands: what fits, what each worker holds, more workers than rows."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from pipeline.config.load import load
from pipeline.config.targets import allowed_packages
from pipeline.protocol.events import AnyEvent, Failed, event_to_json
from pipeline.protocol.trial import Rank, Training, Trial
from pipeline.training.build import build
from pipeline.training.checkpoints.manifest import folder_name
from pipeline.training.collectives import from_first
from pipeline.training.context import TrainContext
from pipeline.training.evaluation import evaluation_module, full_state_dict
from pipeline.training.norms import local
from pipeline.training.step import compute_gradients, train_step
from pipeline.worker import main

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
        _train(_trial(folder, "alone", strategy="single"), Rank())
        on_ranks(_in_two_processes, folder, folder=folder)
        _train(_trial(folder, "fsdp to single", strategy="single", stopped="fsdp"), Rank())
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
        _train(from_first(lambda: _trial(folder, name, **more), rank=where), where)  # noqa: B023


_TRAININGS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "fsdp in fp32": {"precision": "fp32"},
    "fsdp to fsdp": {"precision": "fp32", "stopped": "fsdp in fp32"},
    "single to fsdp": {"stopped": "alone"},
    "fsdp to ddp": {"strategy": "ddp", "stopped": "fsdp"},
    "ddp to fsdp": {"stopped": "fsdp to ddp"},
}


def _plain(work: str, options: dict[str, Any], *more: str, strategy: str = "fsdp") -> Trial:
    overrides = ["train.precision=fp64", LARGE, "train.epochs=1", "optimizer.momentum=0.9", *WORK[work], *more]
    return _as_trial(overrides, strategy).model_copy(update={"options": options})


def _as_trial(overrides: list[str], strategy: str) -> Trial:
    return Training(
        name="main", experiment=load("lab.yaml", overrides).experiment, strategy=strategy,
        launcher="inprocess", workers=1, devices_per_worker=0, device="cpu", cpus_per_worker=1,
        allowed=allowed_packages(),
    )  # fmt: skip


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


NORMED = "model={_target_: lab.Normed}"
FIFTEEN = "train.global_batch_size=15"  # batch statistics need two samples on each rank


def _precisions(folder: Path, rank: Rank) -> None:
    for precision in ("bf16", "fp16", "fp32"):
        for strategy in ("fsdp", "ddp"):
            for model in (LARGE, NORMED):
                context = _take_steps(
                    _as_trial(
                        [f"train.precision={precision}", model, FIFTEEN, "train.epochs=1", "optimizer.lr=0.01"],
                        strategy,
                    ),
                    rank,
                )
                assert {parameter.dtype for parameter in context.model.parameters()} == {torch.float32}
                output = context.wrapped(torch.zeros(2, 4))
                assert output.dtype == (torch.float32 if strategy == "fsdp" else output.dtype)
                output.sum().backward()
                _keep(context, folder / f"{precision}, {strategy}, {model == NORMED}", rank)


def _holds(folder: Path, rank: Rank) -> None:
    context = _take_steps(_plain("one sample left", {}), rank)
    with torch.no_grad():
        evaluation_module(context)(torch.zeros(1, 4, dtype=torch.float64))
    torch.save([tuple(local(one).shape) for one in context.model.parameters()], folder / f"shapes {rank.rank}.pt")


def _buffers(folder: Path, rank: Rank) -> None:
    context = _take_steps(_as_trial([NORMED, FIFTEEN, "train.precision=fp64"], "fsdp"), rank)
    own = next(module.running_mean.clone() for module in context.model.modules() if isinstance(module, nn.BatchNorm1d))
    torch.save(own, folder / f"mean {rank.rank}.pt")
    _keep(context, folder / "normed", rank)


def _trial(folder: Path, name: str, *, strategy: str = "fsdp", precision: str = "fp64", stopped: str = "") -> Trial:
    """A trial with a checkpoint of each step; it goes on from what another one has left if that is given."""
    overrides = [
        f"train.precision={precision}", "checkpoint.every_steps=1", "checkpoint.keep=100", UNEVEN,
        "train.global_batch_size=9", "optimizer._target_=torch.optim.AdamW",
        "metrics.accuracy={_target_: torchmetrics.classification.MulticlassAccuracy, num_classes: 3, average: micro}",
    ]  # fmt: skip
    if stopped:
        (folder / name).mkdir()
        for step in range(1, STOPPED + 1):
            shutil.copytree(folder / stopped / folder_name(step), folder / name / folder_name(step))
    update = {"name": name, "checkpoints": str(folder / name), "resume": bool(stopped)}
    return _as_trial(overrides, strategy).model_copy(update=update)


class _Written:
    """An outbox whose events and files end up beside the checkpoints."""

    stop_asked = False

    def __init__(self, path: str) -> None:
        self._path = path

    def event(self, event: AnyEvent) -> None:
        assert not isinstance(event, Failed), event.traceback or event.error
        with Path(f"{self._path}.jsonl").open("ab") as file:
            file.write(event_to_json(event) + b"\n")

    def file(self, path: Path, name: str) -> None:
        shutil.copyfile(path, f"{self._path}.{Path(name).name}")


def _train(trial: Trial, rank: Rank) -> None:
    main.run(trial, rank=rank, outbox=_Written(f"{trial.checkpoints}.{rank.rank}"))


def test_a_batch_that_does_not_fit_on_one_rank_is_found(command: Callable[..., Any]) -> None:
    """That rank gives up in the middle of a pass, while the other goes on: it ends as well."""
    ended = command(
        "benchmark", "lab.yaml", "--json", "model={_target_: lab.Hungry, limit: 4, rank: 1}", *_WORKERS,
        "train.clip_grad_norm=1.0", "train.on_nonfinite=skip", "train.epochs=9", "--batch-sizes", "4", "--repeats", "1",
    )  # fmt: skip
    assert ended.code == 0, ended.output
    cells = {cell["title"]: cell for cell in json.loads(ended.stdout)["cells"]}
    assert cells["fsdp, 2 workers"]["reason"] == "it does not fit into memory"
    assert cells["fsdp, 2 workers (batch 4)"]["measured"]


def test_a_run_says_what_each_worker_holds(command: Callable[..., Any], tmp_path: Path) -> None:
    ended = command(
        "benchmark", "lab.yaml", LARGE, "--strategies", "ddp,fsdp", "--workers", "2", "--repeats", "1", *_WORKERS,
        f"tracking.directory={tmp_path}/runs", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db",
    )  # fmt: skip
    assert ended.code == 0, ended.output
    (folder,) = (tmp_path / "runs").iterdir()
    whole = " ".join(command("show", str(folder), "--full").stdout.split())
    assert "2 workers (fsdp): 3 x Linear and all other parameters are sharded across ranks." in whole


_WORKERS = ("parallel.strategy=fsdp", "parallel.workers=2", "parallel.launcher=torchrun")


@pytest.mark.timeout(600)
def test_more_workers_than_rows_to_share(root: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three classes on four ranks: the last one has nothing of some parameters. Then three ranks go on."""
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    for world_size, name, stopped in ((4, "four", ""), (3, "four to three", "four")):
        trial = _trial(root, name, stopped=stopped)
        (meeting := root / f"{name} meet").mkdir()
        on_ranks(_train_on, trial, folder=meeting, world_size=world_size)
    expected = torch.load(f"{root}/alone.0.weights.pt")

    assert _distance(torch.load(f"{root}/four.0.weights.pt"), expected) <= ROUNDED
    assert _distance(torch.load(f"{root}/four to three.0.weights.pt"), expected) <= ROUNDED


def _train_on(where: Rank, trial: Trial) -> None:
    _train(trial, where)
