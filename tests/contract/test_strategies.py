"""What every strategy holds to, old or new: on the same global batches it reaches the same weights as ``single``.

Options that lose bits of the gradients on purpose come close to that instead.
"""

# promise: every strategy reaches the weights of `single`, options included

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks

from pipeline import registry
from pipeline.config.load import load
from pipeline.config.targets import allowed_packages
from pipeline.errors import ExperimentError
from pipeline.launchers.base import DirectOutbox, Session
from pipeline.protocol.events import AnyEvent, Failed
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Training, Trial
from pipeline.training.build import build
from pipeline.training.model.synced_norms import check_device
from pipeline.training.step import train_step
from pipeline.worker import main

NAMES = registry.names("strategies")
MANY = [name for name in NAMES if registry.load("strategies", name).Strategy.processes == "many"]
TOLERANCE = 1e-12
CASES = {
    "even": ["train.global_batch_size=10"],
    "uneven last batch": ["train.global_batch_size=16"],  # 50 samples: 2 are left for the last batch
    "one sample left": ["train.global_batch_size=7"],  # rank 1 of 2 has nothing to do in the last step
    "accumulation": ["train.global_batch_size=16", "train.gradient_accumulation=3"],  # 8 samples in 3, 3 and 2
    "clipping": ["train.global_batch_size=16", "train.clip_grad_norm=0.05"],
    "momentum": ["train.global_batch_size=16", "optimizer.momentum=0.9", "optimizer.weight_decay=0.01"],
}
"""Overrides of the project's experiment, by name."""

EXACT_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "static_graph": {"static_graph": True},
    "no views": {"gradient_as_bucket_view": False},
    "unused": {"find_unused_parameters": True},
}
LOSSY_OPTIONS: dict[str, dict[str, Any]] = {
    f"fp16, {name}": {"communication_hook": "fp16"} | options for name, options in EXACT_OPTIONS.items()
}
OPTIONS = EXACT_OPTIONS | LOSSY_OPTIONS
"""ddp's options, by name; the communication hook loses bits."""
OPTION_CASES = ("one sample left", "accumulation")
BUCKET_MB = 1
LARGE = "model={_target_: pipeline.models.MLP, in_features: 4, hidden: [400, 400], num_classes: 3}"
"""1.2 MiB of gradients in fp64, so that there are two buckets."""

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def trained(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], dict[str, Weights]]:
    """The weights that a strategy reaches with a number of workers, by case."""

    @cache
    def train(strategy: str, workers: int) -> dict[str, Weights]:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(project)
            patch.syspath_prepend(project)
            trials = [_trial(name, strategy, workers) for name in CASES]
            folder = tmp_path_factory.mktemp(strategy)
            if workers == 1:
                _train(Rank(), trials, folder)
            else:
                on_ranks(_train, trials, folder, folder=folder, world_size=workers)
        return {case: torch.load(folder / case / "model" / "weights.pt") for case in CASES}

    return train


def _trial(case: str, strategy: str, workers: int, *more: str) -> Trial:
    overrides = ["train.precision=fp64", f"parallel.workers={workers}", *CASES[case], *more]
    experiment = load("lab.yaml", overrides).experiment
    return Training(
        name=case,
        experiment=experiment,
        strategy=strategy,
        launcher="inprocess",
        workers=workers,
        devices_per_worker=0,
        device="cpu",
        cpus_per_worker=1,
        allowed=allowed_packages(),
        train_only=True,  # what is measured afterwards takes longer, and test_measuring.py looks at it
    )


def _train(rank: Rank, trials: list[Trial], folder: Path) -> None:
    """Train all trials on one rank; processes are started and meet once for all of them."""
    for trial in trials:
        session = Session(folder=folder / trial.name, receive=_complain, parallel=trial.experiment.parallel)
        main.run(trial, rank=rank, outbox=DirectOutbox(session))


def _complain(event: AnyEvent) -> None:
    assert not isinstance(event, Failed), event.traceback or event.error


def _distance(one: Weights, other: Weights) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


Trained = Callable[[str, int], dict[str, Weights]]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", NAMES)
def test_one_process_reaches_the_weights_of_single(trained: Trained, strategy: str, case: str) -> None:
    assert _distance(trained(strategy, 1)[case], trained("single", 1)[case]) <= TOLERANCE


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", MANY)
def test_two_processes_reach_the_weights_of_single(trained: Trained, strategy: str, case: str) -> None:
    assert _distance(trained(strategy, 2)[case], trained("single", 1)[case]) <= TOLERANCE


def test_the_cases_train_something_and_differ(trained: Trained) -> None:
    """Equal weights would mean nothing if training didn't move them, or if a case changed nothing."""
    weights = trained("single", 1)

    assert _distance(weights["uneven last batch"], weights["accumulation"]) <= TOLERANCE  # by definition
    for case in set(CASES) - {"uneven last batch", "accumulation"}:
        assert _distance(weights[case], weights["uneven last batch"]) > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_options_survive_json(name: str) -> None:
    options_type: Any = registry.load("strategies", name).Strategy.Options
    options = options_type()

    assert options_type.model_validate_json(options.model_dump_json()) == options
    assert options_type.model_validate(options.model_dump()) == options


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_explained(name: str) -> None:
    fields = registry.load("strategies", name).Strategy.Options.model_fields

    assert [field for field, info in fields.items() if not info.description] == []


@pytest.mark.parametrize("name", NAMES)
def test_unknown_options_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no_such_option"):
        registry.load("strategies", name).Strategy.Options.model_validate({"no_such_option": 1})


@pytest.mark.parametrize("name", NAMES)
def test_a_strategy_says_what_it_is(name: str) -> None:
    """For people in the module's docstring, for the plan in the class."""
    module = registry.load("strategies", name)

    assert len(module.__doc__) > 30
    assert module.Strategy.processes in ("one", "many")
    assert module.Strategy.devices in ("one", "all")
    assert module.Strategy.needs_process_group or module.Strategy.processes == "one"


@pytest.mark.parametrize("name", NAMES)
def test_default_options_run_on_cpu(name: str) -> None:
    strategy: Any = registry.load("strategies", name).Strategy

    assert strategy.refuse(strategy.Options(), device="cpu") is None


def test_ddp_refuses_sync_batch_norm_on_cpu() -> None:
    strategy: Any = registry.load("strategies", "ddp").Strategy
    refusal = strategy.refuse(strategy.Options(sync_batch_norm=True), device="cpu")

    assert refusal is not None
    assert "remove it" in refusal
    assert strategy.refuse(strategy.Options(sync_batch_norm=True), device="cuda") is None


@pytest.mark.parametrize(
    ("buffer", "said"),
    [
        (torch.ones(2, dtype=torch.int16), "is torch.int16, which DDP cannot send to other workers. Use torch.int32, "),
        (torch.ones(2, dtype=torch.float8_e4m3fn), "is torch.float8_e4m3fn, .* Use torch.bfloat16, "),
        (torch.eye(2).to_sparse(), "is torch.sparse_coo, .* Use a dense tensor, "),
    ],
    ids=["int16", "float8", "sparse"],
)
def test_ddp_refuses_buffers_that_gloo_cannot_send(buffer: torch.Tensor, said: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].register_buffer("own", buffer)
    strategy: Any = registry.load("strategies", "ddp").Strategy
    with pytest.raises(ExperimentError, match=f"model: the buffer 0.own {said}"):
        strategy(strategy.Options(), device=torch.device("cpu"), world_size=2).wrap(model)


def test_sync_batch_norm_on_cpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SyncBatchNorm(2))
    check_device(model, torch.device("cpu"))
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    with pytest.raises(ExperimentError, match="model: the layer 1 is a SyncBatchNorm, which works on GPUs only"):
        check_device(model, torch.device("cpu"))


# Options of ddp


@pytest.fixture(scope="module")
def reached(project: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[Weights]]:
    """The weights of both ranks by option and case; "start" are those of a training without learning."""
    folder = tmp_path_factory.mktemp("options")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        patch.syspath_prepend(project)
        trials = {
            f"{name}/{case}": _large(case, "optimizer.lr=0.0" if name == "start" else "").model_copy(
                update={"strategy": "ddp", "options": OPTIONS.get(name, {}) | {"bucket_cap_mb": BUCKET_MB}}
            )
            for name in ("start", *OPTIONS)
            for case in OPTION_CASES
        }
        on_ranks(_take_steps, trials, folder, folder=folder)
    return {
        (name, case): [torch.load(folder / name / case / f"{rank}.pt") for rank in range(2)]
        for name in ("start", *OPTIONS)
        for case in OPTION_CASES
    }


def _large(case: str, *overrides: str) -> Trial:
    return _trial(case, "ddp", 2, LARGE, "train.epochs=1", *filter(None, overrides))


def _take_steps(rank: Rank, trials: dict[str, Trial], folder: Path) -> None:
    """The steps of each trial, without all that is measured and reported besides."""
    for name, trial in trials.items():
        context = build(trial, rank=rank)
        for epoch in range(context.epochs):
            stream = context.batches.training(epoch)
            for step in range(context.order.steps_per_epoch):
                train_step(context, stream, step=epoch * context.order.steps_per_epoch + step)
        (folder / name).mkdir(parents=True, exist_ok=True)
        torch.save(context.model.state_dict(), folder / name / f"{rank.rank}.pt")


Reached = dict[tuple[str, str], list[Weights]]


@pytest.mark.parametrize("case", OPTION_CASES)
@pytest.mark.parametrize("name", OPTIONS)
def test_both_ranks_have_the_same_weights(reached: Reached, name: str, case: str) -> None:
    assert _distance(*reached[name, case]) == 0


@pytest.mark.parametrize("case", OPTION_CASES)
@pytest.mark.parametrize("name", EXACT_OPTIONS)
def test_options_that_lose_nothing_change_nothing(reached: Reached, name: str, case: str) -> None:
    plain = reached["default", case][0]
    assert _distance(reached[name, case][0], plain) <= TOLERANCE
    assert _distance(plain, reached["start", case][0]) > 1e-2


@pytest.mark.parametrize("case", OPTION_CASES)
@pytest.mark.parametrize("name", LOSSY_OPTIONS)
def test_fp16_gradients_are_off_by_fp16s_rounding(reached: Reached, name: str, case: str) -> None:
    """Each step's rounding is half a bit of 11, and the steps' errors may add up to a few times that."""
    plain = reached["default", case][0]
    moved = _distance(plain, reached["start", case][0])
    assert 0 < _distance(reached[name, case][0], plain) < 10 * 2**-11 * moved


def test_ddp_refuses_the_bf16_hook_on_cpu() -> None:
    strategy: Any = registry.load("strategies", "ddp").Strategy
    refusal = strategy.refuse(strategy.Options(communication_hook="bf16"), device="cpu")

    assert refusal is not None
    assert "use fp16" in refusal
    assert strategy.refuse(strategy.Options(communication_hook="bf16"), device="cuda") is None
