"""The section ``sweep``: what it means, what is refused, and that the same seed draws the same values."""

# promise: `sweep`; its progress

import math
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands.sweep import draws
from pipeline.drive import preflight
from pipeline.errors import ExperimentError
from pipeline.experiment import references
from pipeline.experiment.load import ExperimentFile, config_hash, flatten, load, override, to_yaml
from pipeline.experiment.sweep import Parameter, Sweep

FILE = """\
name: swept
model: {_target_: torch.nn.Linear, in_features: 4, out_features: 2}
data: {_target_: pipeline.data.digits}
loss: {_target_: torch.nn.CrossEntropyLoss}
metrics: {accuracy: {_target_: torchmetrics.classification.MulticlassAccuracy, num_classes: 10}}
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
train: {epochs: 4, global_batch_size: 16}
sweep:
"""
PARAMETERS = """\
  parameters:
    optimizer.lr: {log_uniform: [1e-4, 1e-1]}
    train.global_batch_size: {grid: [16, 32]}
  trials: 3
"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(section: str, *overrides: str) -> ExperimentFile:
    Path("s.yaml").write_text(FILE + section)
    return load("s.yaml", overrides)


def swept(section: str) -> Sweep:
    sweep = read(section).experiment.sweep
    assert sweep is not None
    return sweep


def problems_of(section: str, *overrides: str, deeply: bool = False) -> list[str]:
    def found() -> None:
        file = read(section, *overrides)
        if deeply:
            preflight.check(file)

    with pytest.raises(ExperimentError) as caught:
        found()
    return [str(problem) for problem in caught.value.problems]


def parameters(**given: str) -> str:
    lines = "".join(f"    {key.replace('__', '.')}: {value}\n" for key, value in given.items())
    return f"  parameters:\n{lines}  trials: 2\n"


class TestReading:
    def test_what_is_left_out_has_a_default(self) -> None:
        sweep = swept(PARAMETERS)
        assert (sweep.metric, sweep.mode, sweep.search) == ("validation/loss", "auto", "random")
        assert (sweep.asha, sweep.concurrent, sweep.seed) == (None, None, None)
        assert (sweep.total, sweep.combinations) == (6, 2)

    @pytest.mark.parametrize("written", [".grid=[0.001, 0.01]", "={grid: [0.001, 0.01]}"])
    def test_an_override_names_a_parameter_by_its_dotted_key(self, written: str) -> None:
        override = f"sweep.parameters.optimizer.lr{written}"
        Path("s.yaml").write_text(FILE.removesuffix("sweep:\n"))
        alone = load("s.yaml", [override]).experiment.sweep
        assert alone is not None
        assert alone.grids == {"optimizer.lr": (0.001, 0.01)}
        replaced = read(PARAMETERS, override, "sweep.trials=1").experiment.sweep  # a parameter has one kind
        assert replaced is not None
        assert replaced.grids == {"optimizer.lr": (0.001, 0.01), "train.global_batch_size": (16, 32)}

    @pytest.mark.parametrize(
        ("override", "problem"),
        [
            (".optimizer.lr.gird=[1, 2]", ".optimizer.lr.gird: is a list; write a mapping with keys from grid"),
            (".optimizer.lr.uniform=[2, 1]", ".optimizer.lr.uniform: is a list; write the lowest first"),
            (".grid=[2, 1]", ".grid: is a list; write a mapping"),
            ("={train.epochs: {choice: [0]}}", ""),
        ],
    )
    def test_a_wrong_override_of_a_parameter_is_named(self, override: str, problem: str) -> None:
        (found,) = problems_of(PARAMETERS, f"sweep.parameters{override}")
        assert found.startswith(f"command line: sweep.parameters{override}: sweep.parameters{problem}")

    def test_asha_is_switched_on_by_a_word(self) -> None:
        sweep = swept(PARAMETERS + "  asha: true\n")
        assert sweep.asha is not None
        assert (sweep.asha.grace_epochs, sweep.asha.reduction_factor) == (1, 3)

    def test_the_resolved_file_reads_the_same(self) -> None:
        experiment = read(PARAMETERS).experiment
        Path("again.yaml").write_text(to_yaml(experiment))
        assert load("again.yaml").experiment == experiment

    def test_parameters_of_the_tracking_store_hold_only_what_is_given(self) -> None:
        flat = {key: value for key, value in flatten(read(PARAMETERS).experiment).items() if "parameters" in key}
        assert flat == {
            "sweep.parameters.optimizer.lr.log_uniform": "[0.0001, 0.1]",
            "sweep.parameters.train.global_batch_size.grid": "[16, 32]",
        }

    def test_a_trial_is_the_file_with_its_values_and_without_the_sweep(self) -> None:
        varied = read(PARAMETERS).vary({"optimizer.lr": 0.01, "train.global_batch_size": 32}).experiment
        by_hand = load("s.yaml", ["optimizer.lr=0.01", "train.global_batch_size=32", "sweep=null"]).experiment
        assert varied == by_hand
        assert config_hash(varied) == config_hash(by_hand)
        assert varied.sweep is None

    def test_what_refers_to_a_varied_value_follows_it(self) -> None:
        text = FILE.replace("lr: 0.1}", "lr: 0.1, weight_decay: '${optimizer.lr}'}")
        Path("s.yaml").write_text(text + PARAMETERS)
        varied = load("s.yaml").vary({"optimizer.lr": 0.03})
        optimizer = references.fill_in(varied.experiment).optimizer
        assert optimizer is not None
        assert optimizer.arguments["weight_decay"] == 0.03


SGD = "{_target_: torch.optim.SGD, lr: 1}"
DRAWN, GRID = "    optimizer.lr: {uniform: [0, 1]}\n", "    optimizer.lr: {grid: [0, 1]}\n"


@pytest.mark.parametrize(
    ("key", "given", "told"),
    [
        # values that say nothing
        ("optimizer.lr", "{loguniform: [1, 2]}", "unknown key; did you mean log_uniform?"),
        ("optimizer.lr", "{log_uniform: [0, 1]}", "a logarithm needs numbers greater than 0, e.g. [1e-4, 1e-1]"),
        ("optimizer.lr", "{log_uniform: [1, 0.1]}", "write the lowest first, then one that is higher"),
        ("optimizer.lr", "{uniform: [1]}",
         "write two numbers, the lowest and the highest, e.g. [0.0, 0.5], instead of"),
        ("optimizer.lr", "{uniform: [.nan, 1]}", "write two finite numbers"),
        ("optimizer.lr", "{int_uniform: [1.5, 2]}", "write two integers"),
        ("optimizer.lr", "{int_log_uniform: [0, 2]}", "a logarithm needs integers greater than 0"),
        ("optimizer.lr", "{choice: []}", "is an empty list. Add an entry"),
        ("optimizer.lr", "{grid: 3}", "is 3 (an integer); write a list"),
        ("optimizer.lr", "{}", "has no values. Set one of grid, choice, uniform"),
        ("optimizer.lr", "{grid: [1], choice: [2]}", "combines grid and choice. Set one of"),
        ("optimizer.lr", "0.1", "is 0.1 (a number); write a mapping with keys from grid, choice"),
        # values or keys that the file can't have
        ("train.batch_size", "{choice: [16, 32]}", "unknown key; did you mean global_batch_size?"),
        ("train.global_batch_size", "{choice: [16, -1]}", "is -1 (an integer); write an integer greater than 0"),
        ("train.global_batch_size", "{choice: [16, many]}", "is 'many' (a string); write an integer greater than 0"),
        ("train.gradient_accumulation", "{choice: [1, 64]}",
         "is 64, but each worker has only 16 samples per step. Use"),
        ("'optimizer lr'", "{choice: [1]}", "'optimizer lr' is not a key of an experiment"),
        # what is the same for all trials
        ("name", "{choice: [1, 2]}", "name is fixed for all trials of a sweep"),
        ("parallel.workers", "{choice: [1, 2]}", "parallel is fixed for all trials of a sweep"),
        ("tracking.uri", "{choice: [1, 2]}", "tracking is fixed for all trials of a sweep"),
        ("sweep.trials", "{choice: [1, 2]}", "sweep is fixed for all trials of a sweep"),
        ("benchmark", "{choice: [1, 2]}", "benchmark is fixed for all trials of a sweep"),
    ],
)  # fmt: skip
def test_a_parameter_that_is_refused(key: str, given: str, told: str) -> None:
    (problem,) = problems_of(f"  parameters:\n    {key}: {given}\n  trials: 2\n")
    assert problem.startswith(f"s.yaml:10: sweep.parameters.{key.replace(chr(39), '')}")
    assert told in problem


@pytest.mark.parametrize(
    ("section", "told"),
    [
        (PARAMETERS + "  metric: validation/los\n", "is not measured; did you mean validation/loss?"),
        (PARAMETERS + "  metric: train/loss\n", "write the metric that ranks the trials, such as validation/loss"),
        (PARAMETERS + "  mode: smallest\n", "write one of auto, min, max"),
        (PARAMETERS + "  search: bayes\n", "write one of random, optuna"),
        (PARAMETERS + "  search: optuna\n", "optuna cannot search a grid. Set choice, or search: random."),
        (PARAMETERS + "  asha: {reduction_factor: 1}\n", "of at least 2"),
        (PARAMETERS + "  asha: {grace_epoch: 1}\n", "unknown key; did you mean grace_epochs?"),
        (PARAMETERS + "  concurrent: 0\n", "greater than 0"),
        (PARAMETERS + "  scheduler: asha\n", "unknown key"),
        (f"  parameters:\n{DRAWN}", "missing. Set the number of random draws of optimizer.lr."),
        (f"  parameters:\n{GRID}  trials: 2\n", "all parameters are grids"),
        (f"  parameters:\n{GRID}    seed: {{uniform: [1, 2]}}\n  trials: 10001\n", "result in 20,002 trials"),
        ("  trials: 2\n", "sweep.parameters: missing"),
        (parameters(optimizer=f"{{choice: [{SGD}]}}", optimizer__lr="{choice: [1]}"),
         "is inside optimizer, which is also varied. Remove one of them."),
    ],
)  # fmt: skip
def test_a_sweep_that_is_refused(section: str, told: str) -> None:
    (problem,) = problems_of(section)
    assert re.match(r"s\.yaml:\d+: sweep", problem)
    assert told in problem


def test_all_problems_at_once() -> None:
    section = parameters(train__epoch="{grid: [1]}", optimizer__lr="{choice: [1, 2]}", train__seeds="{choice: [1]}")
    assert len(problems_of(section)) == 2
    assert len(problems_of(parameters(train__global_batch_size="{choice: [16, -1, many]}"))) == 2
    fractions = problems_of(parameters(train__epochs="{uniform: [1.5, 8.5]}"))
    assert ["is 1.5 (a number); write an integer" in fractions[0], len(fractions)] == [True, 2]
    section = parameters(optimizer__momentun="{choice: [0.0, 0.9]}", model___target_="{choice: [torch.nn.Liner]}")
    assert problems_of(section, deeply=True) == [
        "s.yaml:10: sweep.parameters.optimizer.momentun: torch.optim.SGD has no such argument; did you mean momentum?",
        "s.yaml:11: sweep.parameters.model._target_: torch.nn has no Liner; did you mean Linear?",
    ]


class TestDrawing:
    def test_the_same_seed_draws_the_same_whatever_trials_and_parameters_are_added(self) -> None:
        sweep, more = swept(PARAMETERS), swept(PARAMETERS.replace("trials: 3", "trials: 9"))
        assert list(draws(sweep, seed=1)) == list(draws(sweep, seed=1)) != list(draws(sweep, seed=2))
        assert list(draws(more, seed=1))[: sweep.total] == list(draws(sweep, seed=1))
        other = PARAMETERS.replace("  trials", "    optimizer.momentum: {uniform: [0.0, 0.9]}\n  trials")
        pairs = zip(draws(sweep, seed=1), draws(swept(other), seed=1), strict=True)
        assert all(one["optimizer.lr"] == two["optimizer.lr"] for one, two in pairs)

    def test_each_draw_meets_each_combination_of_the_grids(self) -> None:
        drawn = list(draws(swept(PARAMETERS + "  seed: 5\n"), seed=5))
        assert [values["train.global_batch_size"] for values in drawn] == [16, 32] * 3
        assert len({values["optimizer.lr"] for values in drawn}) == 3
        assert drawn[0]["optimizer.lr"] == drawn[1]["optimizer.lr"]

    @pytest.mark.parametrize(
        ("parameter", "allowed"),
        [
            (Parameter(uniform=(0.5, 0.6)), lambda value: 0.5 <= value <= 0.6),
            (Parameter(log_uniform=(1e-4, 1e-1)), lambda value: 1e-4 <= value <= 1e-1),
            (Parameter(int_uniform=(2, 4)), lambda value: value in (2, 3, 4)),
            (Parameter(int_log_uniform=(1, 3)), lambda value: value in (1, 2, 3)),
            (Parameter(choice=("a", None)), lambda value: value in ("a", None)),
        ],
    )
    def test_values_lie_where_they_should_and_reach_everywhere(self, parameter: Parameter, allowed: Any) -> None:
        values = [one["key"] for one in draws(Sweep(parameters={"key": parameter}, trials=400), seed=0)]
        assert all(map(allowed, values))
        if parameter.uniform or parameter.log_uniform:
            assert len(set(values)) > 50
        else:
            assert len(set(values)) == len(parameter.choice or (1, 2, 3))

    def test_a_logarithm_is_evenly_spread_and_numbers_can_be_read(self) -> None:
        sweep = Sweep(parameters={"key": Parameter(log_uniform=(1e-4, 1.0))}, trials=2000)
        values = [one["key"] for one in draws(sweep, seed=0)]
        tens = [math.floor(math.log10(value)) for value in values]
        for ten in (-4, -3, -2, -1):
            assert 400 < tens.count(ten) < 600
        assert all(len(f"{value:g}") <= 10 and float(f"{value:.4g}") == value for value in values)


@pytest.mark.parametrize(
    "value", [0.1, 1e-5, 3, True, None, "sgd", "1e-3", "a: b", [1, 2.5], {"_target_": "a.b", "x": [1]}, math.inf]
)
def test_an_override_gives_the_value_back(value: object) -> None:
    Path("s.yaml").write_text(FILE + PARAMETERS)
    file = load("s.yaml", [override("optimizer.weight_decay", value)])
    assert file.experiment.optimizer.arguments["weight_decay"] == value
