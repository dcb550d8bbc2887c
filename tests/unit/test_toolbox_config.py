"""The options of docs/model-and-data.md: what they may be, what is said about them, and what is refused up front."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import samples
import toys
import yaml

from pipeline.errors import ExperimentError, ResourceError
from pipeline.experiment.load import load
from pipeline.experiment.schema import Experiment
from pipeline.experiment.train import Compile, Ema
from pipeline.plan import resources
from pipeline.plan.plan import DataSizes, Plan, describe, make_plan
from pipeline.plan.resources import Resources
from pipeline.record.console import _format_finished
from pipeline.results.measured import result_of_run
from pipeline.results.speedup import measure_rows
from pipeline.tracking.loggers import scalars
from pipeline.train.storage import dump_trained

LAPTOP = Resources(cpus=4, memory_mb=16384)
SERVER = Resources(cpus=8, memory_mb=16384, gpus=("H200",) * 2)
ALL = {"compile": {"dynamic": True}, "activation_checkpointing": "blocks.*", "ema": {"decay": 0.9, "start_step": 5}}


def plan(machine: Resources = LAPTOP, *, parallel: dict[str, Any] | None = None, **train: Any) -> Plan:
    sections = {"parallel": parallel} if parallel else {}
    return make_plan(toys.experiment(train=train, **sections), machine)


@pytest.mark.parametrize(
    ("written", "compiling"),
    [
        (False, None),
        (True, Compile()),
        ({}, Compile(mode="default", dynamic=False, fullgraph=False)),
        ({"mode": "max-autotune", "fullgraph": True}, Compile(mode="max-autotune", fullgraph=True)),
    ],
)
def test_compile_and_ema_are_yes_no_or_how(written: Any, compiling: Compile | None) -> None:
    experiment = toys.experiment(train={"compile": written})
    assert experiment.train.compile == compiling
    assert Experiment.model_validate_json(experiment.model_dump_json()) == experiment
    for given, averaging in ((False, None), (True, Ema()), ({"decay": 0.9}, Ema(decay=0.9, start_step=0))):
        assert toys.experiment(train={"ema": given}).train.ema == averaging


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train.compile={mode: fast}", "train.compile.mode: .*'fast'.*reduce-overhead"),
        ("train.compile={mod: default}", "train.compile.mod: unknown key; did you mean mode"),
        ("train.ema={decay: 1.0}", "train.ema.decay: .*less than 1"),
        ("train.ema={decay: -0.5}", "train.ema.decay: .*greater than 0"),
        ("train.activation_checkpointing=3", "train.activation_checkpointing: is 3"),
    ],
)
def test_a_wrong_value_is_told_with_its_key(project: Path, line: str, message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        load(str(project / "lab.yaml"), [line])


def test_the_plan_says_what_is_on_and_nothing_of_what_is_off() -> None:
    planned = plan(**ALL, cudnn_benchmark=True)
    assert yaml.safe_load(describe(planned, DataSizes(22, 10, 3)))["training"] == [
        "train.cudnn_benchmark",
        "torch.compile (default, dynamic)",
        "activation checkpointing of blocks.*",
        "EMA of the weights (decay 0.9 from step 5 on), evaluated and logged as the model",
    ]
    assert "training:" not in describe(plan(), DataSizes(22, 10, 3))


def test_compiling_without_a_compiler_or_replicas_is_refused() -> None:
    bare = Resources(cpus=4, memory_mb=16384, has_compiler=False)
    with pytest.raises(ResourceError, match=r"train.compile: no C\+\+ compiler found, .* Install g\+\+"):
        plan(bare, compile=True)
    plan(bare)
    with pytest.raises(ExperimentError, match=r"parallel.strategy: dp copies the model in each step.*Use ddp"):
        plan(SERVER, parallel={"strategy": "dp"}, compile=True)
    plan(LAPTOP, parallel={"strategy": "dp"}, compile=True)  # one replica


def test_the_compiler_is_looked_for_where_torch_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert not resources.detect().has_compiler
    (tmp_path / ("clang++" if sys.platform == "darwin" else "g++")).symlink_to(sys.executable)
    assert resources.detect().has_compiler
    monkeypatch.setenv("CXX", "my-compiler")
    assert not resources.detect().has_compiler
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.defpath}")
    monkeypatch.setenv("CXX", shutil.which("sh") or "")
    assert resources.detect().has_compiler


def test_how_a_training_is_computed_is_no_part_of_what_is_trained() -> None:
    """So a run that ran out of memory can go on with activation checkpointing."""
    how = {"compile": True, "activation_checkpointing": "0"}
    assert dump_trained(toys.experiment()) == dump_trained(toys.experiment(train=how))
    assert dump_trained(toys.experiment()) != dump_trained(toys.experiment(train={"ema": True}))


def test_the_time_of_compiling_is_told_in_the_terminal_a_metric_and_in_the_result() -> None:
    end = samples.finished("main", samples.spread(190.0, noise=2), compile_s=12.34)
    assert _format_finished(end)[-2:] == ["compiled in 12.3 s", "first step after 6.2 s"]
    assert {point.name: point.value for point in scalars(end)}["time/compile_s"] == 12.34
    assert "time/compile_s" not in {point.name for point in scalars(samples.finished("a", samples.spread(1.0)))}
    result = result_of_run(measure_rows([samples.MAIN], [end]), hardware="")
    fact = result.fact("compile_s")
    assert fact is not None
    assert (fact.value, str(fact)) == (12.34, "12 s")
    (table,) = (table for table in result.tables if table.title == "Memory and startup")
    assert "compile time" in table.header
    assert fact in table.rows[0]
