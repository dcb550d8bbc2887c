"""What can't work is refused before anything starts: the right exit code, file and line, and what to write instead."""

# promise: the commands, their help, exit codes, plan and schema
# promise: a run without a step is neither listed nor sent
# promise: no silent fallback; errors name place, value and fix, before anything starts

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from recordings import copied, written_here
from toys import Kept

from pipeline.errors import PipelineError
from pipeline.experiment.load import load
from pipeline.experiment.targets import allowed_packages
from pipeline.plan.plan import make_plan
from pipeline.plan.resources import Resources
from pipeline.protocol.trial import Rank
from pipeline.train.run import train

LAB = (Path(__file__).parents[2] / "project" / "lab.yaml").read_text()

Command = Callable[..., Any]


class Wrong(NamedTuple):
    """An experiment file or a command line that can't work, and what must be said about it."""

    name: str
    code: int
    said: tuple[str, ...]
    text: str | bytes = LAB
    more: tuple[str, ...] = ()


def lab(old: str, new: str) -> str:
    """The project's experiment with a mistake."""
    assert LAB.count(old) == 1
    return LAB.replace(old, new)


FILES = [
    Wrong("misspelt key", 2, ("wrong.yaml:7:", "did you mean epochs?"), lab("epochs", "epoch")),
    Wrong("wrong type", 2, ("wrong.yaml:7: train.epochs", "two"), lab("epochs: 2", "epochs: two")),
    Wrong("out of range", 2, ("train.epochs", "-1"), lab("epochs: 2", "epochs: -1")),
    Wrong("duplicate key", 2, ("wrong.yaml:3:", "seed"), lab("seed: 3", "seed: 3\nseed: 4")),
    Wrong("binary", 2, ("is not UTF-8 text",), b"\x89PNG\r\n\x1a\n\x00\xff\xfe"),
    Wrong("no target", 2, ("wrong.yaml:3: model", "_target_"), lab("_target_: lab.Net", "net: lab.Net")),
    Wrong("no such target", 2, ("model._target_", "did you mean Net?"), lab("lab.Net", "lab.Nett")),
    Wrong("target not allowed", 2, ("is not in an allowed package",), lab("lab.Net", "subprocess.run")),
    Wrong("target through a door", 2, ("model._target_",), lab("lab.Net", "lab.os.system")),
    Wrong("wrong keyword", 2, ("model.deep",), lab("lab.Net", "lab.Net, deep: true")),
    Wrong("missing keyword", 2, ("model", "in_features"), lab("lab.Net", "torch.nn.Linear, out_features: 3")),
    Wrong("missing interpolation", 2, ("wrong.yaml:2:", "nowhere"), lab("seed: 3", "seed: ${nowhere}")),
    Wrong("no loss", 2, ("loss: missing",), lab("loss: {_target_: torch.nn.CrossEntropyLoss}\n", "")),
    Wrong("batch smaller than workers", 2, ("train.global_batch_size", "1 samples cannot be split over 2 workers"),
          LAB, ("train.global_batch_size=1", "parallel.workers=2", "parallel.strategy=ddp")),
    Wrong("two workers in process", 2, ("parallel.workers", "launcher to torchrun or ray"),
          LAB, ("parallel.workers=2", "parallel.strategy=ddp")),
    Wrong("two workers of dp", 2, ("parallel.workers", "strategy: ddp"),
          LAB, ("parallel.workers=2", "parallel.strategy=dp", "parallel.launcher=torchrun")),
    Wrong("unknown launcher", 2, ("parallel.launcher", "inprocess, ray, torchrun"), LAB, ("parallel.launcher=slurm",)),
    Wrong("unknown option", 2, ("parallel.options.bucket_cap", "did you mean bucket_cap_mb?"),
          LAB, ("parallel.strategy=ddp", "parallel.options={bucket_cap: 5}")),
    Wrong("option refused on CPU", 2, ("parallel.options", "sync_batch_norm needs GPUs"),
          LAB, ("parallel.strategy=ddp", "parallel.options={sync_batch_norm: true}", "parallel.device=cpu")),
    Wrong("malformed override", 2, ("Write key=value",), LAB, ("train.epochs",)),
    Wrong("override inside a value", 2, ("seed.deep=1",), LAB, ("seed.deep=1",)),
    Wrong("file store", 2, ("sqlite:///mlflow.db",), LAB, ("tracking.uri=./mlruns",)),
    Wrong("unknown store", 2, ("tracking.uri",), LAB, ("tracking.uri=redis://localhost",)),
    Wrong("store in no folder", 3, ("mkdir -p",), LAB, ("tracking.uri=sqlite:///no/such/folder/mlflow.db",)),
    Wrong("store names no file", 2, ("Use sqlite:///mlflow.db",), LAB, ("tracking.uri=sqlite:////",)),
    Wrong("store is a folder", 3, ("is a folder",), LAB, ("tracking.uri=sqlite:////tmp",)),
    Wrong("runs directory is a file", 3, ("tracking.directory: lab.py can't be written",),
          LAB, ("tracking.directory=lab.py",)),
]  # fmt: skip
"""Found before a process is started; test_load.py and test_plan.py have more."""

COMPONENTS = [
    Wrong("data raises", 2, ("data: lab.from_a_file raised FileNotFoundError",), lab("lab.points", "lab.from_a_file")),
    Wrong("data is no pair", 2, ("Return a tuple",), lab("lab.points", "lab.alone")),
    Wrong("ragged batches", 2, ("can't be stacked into a batch",), lab("lab.points", "lab.ragged")),
    Wrong("loss is not a scalar", 2, ("loss", "not a scalar"), lab("torch.nn.CrossEntropyLoss", "lab.per_sample")),
    Wrong("loss is a sum", 2, ("set reduction: mean",),
          lab("torch.nn.CrossEntropyLoss", "torch.nn.CrossEntropyLoss, reduction: sum")),
    Wrong("negative learning rate", 2, ("optimizer: torch.optim.SGD raised ValueError",), lab("lr: 0.1", "lr: -0.1")),
    Wrong("loss is NaN", 1, ("the loss is nan in step 1 (epoch 1)",),
          lab("torch.nn.CrossEntropyLoss", "lab.NotANumber")),
]  # fmt: skip
"""Found once the experiment is built."""


def run(command: Command, project: Path, wrong: Wrong, *options: str) -> Any:
    file = project / "wrong.yaml"
    file.write_bytes(wrong.text if isinstance(wrong.text, bytes) else wrong.text.encode())
    return command("run", file.name, "--no-baseline", *options, *wrong.more)


def written(project: Path) -> list[tuple[str, int]]:
    """Runs and stores in the project, which tests before may have left there."""
    found = [*project.glob("runs/*"), *project.glob("mlflow.db")]
    return sorted((path.name, path.stat().st_mtime_ns) for path in found)


def assert_refused(ended: Any, wrong: Wrong) -> None:
    assert ended.code == wrong.code, ended.output
    for fragment in wrong.said:
        assert fragment in ended.stderr
    assert "Traceback (most recent call last)" not in ended.output


@pytest.mark.parametrize("wrong", FILES, ids=lambda wrong: wrong.name)
def test_it_is_refused_before_it_starts(command: Command, project: Path, wrong: Wrong) -> None:
    before = written(project)
    assert_refused(run(command, project, wrong), wrong)
    assert written(project) == before


@pytest.mark.parametrize("wrong", COMPONENTS, ids=lambda wrong: wrong.name)
def test_it_is_refused_once_it_is_built(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Wrong
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    file = tmp_path / "wrong.yaml"
    file.write_text(str(wrong.text))
    plan = make_plan(
        load(file).experiment, Resources(cpus=2, memory_mb=4096), allowed=allowed_packages(), with_baseline=False
    )
    with pytest.raises(PipelineError) as caught:
        train(plan.main, rank=Rank(), outbox=Kept())
    assert caught.value.exit_code == wrong.code
    for fragment in wrong.said:
        assert fragment in str(caught.value)


def test_the_command_says_what_a_worker_refused(
    command: Command, project: Path, tmp_path: Path, empty_store: Path
) -> None:
    store = (f"tracking.uri={copied(empty_store, tmp_path).uri}", f"tracking.directory={tmp_path}/runs")
    wrong = COMPONENTS[0]._replace(more=store)
    with written_here():
        ended = run(command, project, wrong)
    assert_refused(ended, wrong)
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"Its logs are in {folder}.\npipeline list shows it only with --all.\n" in ended.stderr
    assert (folder / "log.txt").read_text()
    listed = ("list", "--quiet", f"--directory={folder.parent}")
    assert command(*listed).stdout == ""
    assert command(*listed, "--all").stdout == f"{folder.name}\n"


def test_a_missing_file_is_a_usage_error(command: Command) -> None:
    ended = command("run", "labb.yaml")
    assert ended.code == 2
    assert "labb.yaml: there is no such file; did you mean lab.yaml?" in ended.stderr


@pytest.mark.parametrize("key", ["tracking.uri=sqlite:////proc/mlflow.db", "tracking.directory=/proc/runs"])
def test_a_folder_that_nobody_can_write_is_refused(command: Command, tmp_path: Path, key: str) -> None:
    ended = command("run", "lab.yaml", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db", key)
    assert ended.code == 3
    assert "/proc" in ended.stderr


def test_more_workers_than_cores_are_refused_at_once(command: Command) -> None:
    """By torchrun; Ray's are in integration/test_ray_cluster.py."""
    more = ["parallel.launcher=torchrun", "parallel.strategy=ddp", "train.global_batch_size=4096"]
    begin = time.monotonic()
    ended = command("run", "lab.yaml", *more, "parallel.workers=4096")
    assert ended.code == 3
    assert "4096 workers" in ended.stderr
    assert "Use at most" in ended.stderr
    assert time.monotonic() - begin < 60  # not an endless wait for cores


def test_cuda_without_a_gpu_is_refused(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ended = command("run", "lab.yaml", "parallel.device=cuda")
    assert ended.code == 3
    assert "cuda needs a GPU" in ended.stderr
