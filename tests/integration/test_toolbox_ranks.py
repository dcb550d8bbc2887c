"""Local SGD, EMA and activation checkpointing in two processes, all of them started once."""

import copy
import importlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from safetensors.torch import load_file

from pipeline.config.load import load
from pipeline.config.targets import allowed_packages
from pipeline.errors import ExperimentError
from pipeline.planning.plan import make_plan
from pipeline.planning.resources import Resources
from pipeline.protocol.events import (
    AnyEvent,
    Event,
    Failed,
    Finished,
    Metrics,
    Resumed,
    Warned,
    event_from_json,
    event_to_json,
)
from pipeline.protocol.trial import Rank, Training, Trial
from pipeline.training import probe
from pipeline.training.checkpoints.manifest import folder_name
from pipeline.training.collectives import from_first
from pipeline.training.order import SampleOrder
from pipeline.worker import main

START, PERIOD, STOPPED, STEPS = 2, 4, 5, 8
"""Workers are averaged after step 6 alone: they differ after the first epoch, when they stop, and in the end."""
LOCAL = {"local_sgd_start_step": START, "local_sgd_period": PERIOD}
NORMED = [
    "model._target_=lab.Normed",
    "train.global_batch_size=15",
    "optimizer.momentum=0.9",
    "train.clip_grad_norm=1.0",
]
EMA = ["train.ema={decay: 0.7, start_step: 2}", "optimizer._target_=torch.optim.AdamW"]
BLOCKS = ["model={_target_: pipeline.models.MLP, in_features: 4, hidden: [16, 16, 16], num_classes: 3, dropout: 0.3}"]
RECOMPUTED = [*BLOCKS, "train.activation_checkpointing=true"]
ROUNDED = 1e-12

Weights = dict[str, torch.Tensor]


def _trainings() -> dict[str, dict[str, Any]]:
    local = {"overrides": NORMED, "options": LOCAL}
    linear = {"strategy": "fsdp", "options": {"groups": "Linear"}}
    return {
        "local": local,
        "local in fp32": {**local, "precision": "fp32"},
        "local again": {**local, "precision": "fp32", "stopped": "local in fp32"},
        "ema, ddp": {"overrides": EMA},
        "ema, fsdp": {"overrides": EMA, "strategy": "fsdp"},
        "ema, fsdp again": {"overrides": EMA, "strategy": "fsdp", "stopped": "ema, fsdp"},
        "plain, ddp": {"overrides": BLOCKS, "precision": "fp32"},
        "recomputed, ddp": {"overrides": RECOMPUTED, "precision": "fp32"},
        "plain, fsdp": {"overrides": BLOCKS, "precision": "fp32", **linear},
        "recomputed, fsdp": {"overrides": RECOMPUTED, "precision": "fp32", **linear},
    }


@pytest.fixture(scope="module")
def root(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        patch.syspath_prepend(project)
        folder = tmp_path_factory.mktemp("toolbox")
        _train(_trial(folder, "ema, single", overrides=EMA, strategy="single"), Rank())
        on_ranks(_in_two_processes, folder, folder=folder)
        _train(_trial(folder, "local to one", overrides=NORMED, strategy="single", stopped="local"), Rank())
        yield folder


def _in_two_processes(where: Rank, folder: Path) -> None:
    # Where a step's time goes is measured behind each training; once is enough here.
    probe.SLOT_SECONDS, probe.ROUNDS, probe.FEWEST_ROUNDS = 0.0, 1, 1
    for name, more in _trainings().items():
        _train(from_first(lambda: _trial(folder, name, **more), rank=where), where)  # noqa: B023


def _trial(
    folder: Path,
    name: str,
    *,
    overrides: list[str],
    options: dict[str, Any] | None = None,
    strategy: str = "ddp",
    precision: str = "fp64",
    stopped: str = "",
) -> Trial:
    """A trial with a checkpoint of each step; it goes on from what another one has left if that is given."""
    if stopped:
        (folder / name).mkdir()
        for step in range(1, STOPPED + 1):
            shutil.copytree(folder / stopped / folder_name(step), folder / name / folder_name(step))
    shared = ["checkpoint.every_steps=1", "checkpoint.keep=100", f"train.precision={precision}"]
    return Training(
        name=name, experiment=load("lab.yaml", [*shared, *overrides]).experiment, strategy=strategy,
        options=options or {}, launcher="inprocess", workers=1, devices_per_worker=0, device="cpu", cpus_per_worker=1,
        allowed=allowed_packages(), checkpoints=str(folder / name), resume=bool(stopped),
    )  # fmt: skip


class _Written:
    """An outbox whose events and files end up in a folder."""

    stop_asked = False

    def __init__(self, path: Path) -> None:
        self._path = path

    def event(self, event: AnyEvent) -> None:
        assert not isinstance(event, Failed), event.traceback or event.error
        with Path(f"{self._path}.jsonl").open("ab") as file:
            file.write(event_to_json(event) + b"\n")

    def file(self, path: Path, name: str) -> None:
        shutil.copy(path, f"{self._path}.{Path(name).name}")


def _train(trial: Trial, rank: Rank) -> None:
    main.run(trial, rank=rank, outbox=_Written(Path(f"{trial.checkpoints}.{rank.rank}")))


def events(root: Path, name: str, kind: type[Event]) -> list[Any]:
    lines = (root / f"{name}.0.jsonl").read_text().splitlines()
    return [event for event in map(event_from_json, lines) if isinstance(event, kind)]


def series(root: Path, name: str, metric: str, *, after: int = 0) -> dict[int, float]:
    points = [point for event in events(root, name, Metrics) for point in event.points if point.name == metric]
    return {point.step: point.value for point in points if point.step > after}


def weights(root: Path, name: str) -> Weights:
    loaded: Weights = torch.load(root / f"{name}.0.weights.pt", weights_only=True)
    return loaded


def saved(root: Path, name: str, step: int) -> Weights:
    return load_file(root / name / folder_name(step) / "state.safetensors")


def farthest(one: dict[int, float], other: dict[int, float]) -> float:
    assert list(one) == list(other)
    return max(abs(one[step] - other[step]) for step in one)


# Local SGD


class _Worker:
    """One worker of the reference: torch and nothing else."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def gradients(self, inputs: torch.Tensor, targets: torch.Tensor, *, share: float) -> float:
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.model(inputs), targets)
        (loss * share * 2).backward()
        return float(loss.detach() * share)

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def _averaged(workers: list[_Worker], of: str) -> None:
    """Put the mean of parameters, or of their gradients, in their places."""
    with torch.no_grad():
        for group in zip(*(main.model.parameters() for main in workers), strict=True):
            tensors = [one.grad if of == "gradients" else one for one in group]
            mean = (tensors[0] + tensors[1]) / 2
            for tensor in tensors:
                tensor.copy_(mean)


@pytest.fixture(scope="module")
def reference(root: Path) -> tuple[dict[int, float], list[Weights]]:
    """The losses of post-local SGD as the paper has it, and both workers' weights in the end."""
    lab = importlib.import_module("lab")
    inputs, targets = lab.points()[0].tensors
    torch.manual_seed(0)
    model = lab.Normed().double()
    model.load_state_dict({name: one for name, one in _first_weights(root).items() if name in model.state_dict()})
    workers = [_Worker(model), _Worker(model)]
    order, losses = SampleOrder(samples=50, global_batch_size=15, seed=3), dict[int, float]()
    for step in range(STEPS):
        batch = order.global_batch(*divmod(step, order.steps_per_epoch))
        shares = [batch[rank::2] for rank in range(2)]
        losses[step + 1] = sum(
            main.gradients(inputs[share].double(), targets[share], share=len(share) / len(batch))
            for main, share in zip(workers, shares, strict=True)
        )
        if step < START:
            _averaged(workers, "gradients")
        for one in workers:
            one.step()
        if step + 1 > START and (step + 1 - START) % PERIOD == 0:
            _averaged(workers, "parameters")
    return losses, [one.model.state_dict() for one in workers]


def _first_weights(root: Path) -> Weights:
    """What the trial's seed makes of the model."""
    from pipeline.training.build import build

    trial = _trial(root, "local", overrides=NORMED, strategy="single")
    return build(trial, rank=Rank()).model.state_dict()


def test_local_sgd_is_that_of_the_paper(root: Path, reference: tuple[dict[int, float], list[Weights]]) -> None:
    losses, workers = reference
    assert farthest(series(root, "local", "train/loss"), losses) <= ROUNDED

    checkpoint = saved(root, "local", STEPS)
    for rank, end in ((0, ""), (1, "@1")):
        for name, own in workers[rank].items():
            torch.testing.assert_close(checkpoint[f"own/model/{name}{end}"], own, rtol=ROUNDED, atol=ROUNDED)
    for name in ("layers.1.weight", "layers.1.bias"):
        mean = (workers[0][name] + workers[1][name]) / 2
        assert (workers[0][name] - workers[1][name]).abs().max() > 1e-4, "the workers have gone apart"
        torch.testing.assert_close(weights(root, "local")[name], mean, rtol=ROUNDED, atol=ROUNDED)
        torch.testing.assert_close(checkpoint[f"model/{name}"], mean, rtol=ROUNDED, atol=ROUNDED)


def test_local_sgd_evaluates_the_average(root: Path) -> None:
    lab = importlib.import_module("lab")
    inputs, targets = lab.points()[1].tensors
    model = lab.Normed().double()
    model.load_state_dict(weights(root, "local"))
    loss = torch.nn.functional.cross_entropy(model.eval()(inputs.double()), targets)
    assert series(root, "local", "validation/loss")[STEPS] == pytest.approx(float(loss.detach()), abs=ROUNDED)


def test_no_worker_has_weights_of_its_own_before_it_begins(root: Path) -> None:
    assert not [name for name in saved(root, "local", START) if name.startswith("own/")]
    assert [name for name in saved(root, "local", START + 1) if name.startswith("own/")]


def test_local_sgd_goes_on_to_the_bit_while_workers_differ(root: Path) -> None:
    whole, again = (saved(root, name, STEPS) for name in ("local in fp32", "local again"))

    assert [event.step for event in events(root, "local again", Resumed)] == [STOPPED]
    assert events(root, "local again", Warned) == []
    for metric in ("train/loss", "validation/loss"):
        expected = series(root, "local in fp32", metric, after=STOPPED)
        assert series(root, "local again", metric, after=STOPPED) == expected
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_another_number_of_workers_goes_on_from_the_average(root: Path) -> None:
    (warning,) = events(root, "local to one", Warned)

    assert warning.message.startswith("the weights of 2 workers, which differed in local SGD, were averaged")
    assert list(series(root, "local to one", "train/loss", after=STOPPED)) == [6, 7, 8]


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        ([], {"local_sgd_period": 4}, "parallel.options: local_sgd_start_step is missing"),
        ([], {**LOCAL, "communication_hook": "fp16"}, "parallel.options: local SGD sends no gradients for comm"),
        (
            ["train.ema=true"],
            LOCAL,
            "parallel.options.local_sgd_period: lets the workers' weights differ, which train.ema can't",
        ),
        (
            ["train.on_nonfinite=skip"],
            LOCAL,
            "parallel.options.local_sgd_period: .* skip a step together; write train.on_nonfinite: stop",
        ),
        (["train.precision=fp16"], LOCAL, "parallel.options.local_sgd_period: .* use precision: bf16"),
    ],
)
def test_local_sgd_refuses_what_it_would_spoil(
    root: Path, overrides: list[str], options: dict[str, Any], message: str
) -> None:
    shared = ["parallel.strategy=ddp", "parallel.workers=2", "parallel.launcher=torchrun"]
    given = [f"parallel.options.{key}={value}" for key, value in options.items()]
    with pytest.raises(ExperimentError, match=message):
        make_plan(load("lab.yaml", [*shared, *given, *overrides]).experiment, Resources(cpus=2, memory_mb=4096))


# EMA


@pytest.mark.parametrize("name", ["ema, ddp", "ema, fsdp"])
def test_averages_are_those_of_one_process(root: Path, name: str) -> None:
    for metric in ("train/loss", "validation/loss"):
        assert farthest(series(root, name, metric), series(root, "ema, single", metric)) <= ROUNDED
    for key, own in weights(root, "ema, single").items():
        torch.testing.assert_close(weights(root, name)[key], own, rtol=ROUNDED, atol=ROUNDED)


def test_sharded_averages_go_on_to_the_bit(root: Path) -> None:
    assert [event.step for event in events(root, "ema, fsdp again", Resumed)] == [STOPPED]
    assert (
        series(root, "ema, fsdp again", "validation/loss")[STEPS]
        == (series(root, "ema, fsdp", "validation/loss")[STEPS])
    )
    for key, own in weights(root, "ema, fsdp").items():
        assert torch.equal(weights(root, "ema, fsdp again")[key], own)


def test_each_rank_of_fsdp_holds_its_part_of_them(root: Path) -> None:
    """As much as of the parameters: AdamW's state is twice that, gradients as much."""
    (ddp,), (fsdp,) = (events(root, name, Finished) for name in ("ema, ddp", "ema, fsdp"))
    assert ddp.result.held is not None
    assert fsdp.result.held is not None
    assert sum(fsdp.result.held.mb) == pytest.approx(ddp.result.held.mb[0], rel=0.1)


# Activation checkpointing


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_recomputed_training_is_the_same_to_the_bit(root: Path, strategy: str) -> None:
    one, other = (f"{name}, {strategy}" for name in ("plain", "recomputed"))
    assert series(root, one, "train/loss") == series(root, other, "train/loss")
    assert all(torch.equal(own, weights(root, other)[name]) for name, own in weights(root, one).items())
