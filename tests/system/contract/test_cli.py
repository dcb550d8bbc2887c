"""The commands, as users call them."""

# promise: the commands, their help, exit codes, plan and schema

import errno
import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from typed import understand

from pipeline import cli, registry
from pipeline.cli import GROUPS
from pipeline.protocol.trial import Experiment

EXPERIMENTS = Path(__file__).parents[3] / "experiments"
MLP = str(EXPERIMENTS / "mlp.yaml")
COMMANDS = tuple(name for commands in GROUPS.values() for name in commands)
HEAVY = (
    *("torch", "ray", "mlflow", "sklearn", "matplotlib", "torchmetrics", "pandas", "scipy"),
    *("cookiecutter", "optuna", "tensorboard", "transformers", "wandb", "webdataset"),  # optional
)

Command = Callable[..., Any]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(command: Command, name: str) -> None:
    ended = command(name, "--help")

    assert ended.code == 0
    assert f"Usage: pipeline {name} " in ended.stdout
    assert re.findall(r"<(?:bool|str|list\[str\])>", ended.stdout) == []
    assert max(map(len, ended.stdout.splitlines())) <= 80
    shown = [line.strip() for line in ended.stdout.partition("Examples:")[2].splitlines() if line.strip()]
    (examples,) = (commands[name].examples for commands in GROUPS.values() if name in commands)
    assert shown == list(examples)
    assert len(examples) == 2


def test_a_full_disk_is_told_in_a_line(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device", "runs/r/log.txt"))
    monkeypatch.setattr(cli, "load_verb", full)
    ended = command("list")
    assert (ended.code, ended.stderr) == (3, "error: runs/r/log.txt: No space left on device\n")


def test_the_examples_of_the_help_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXPERIMENTS.parent)
    for name, verb in (item for commands in GROUPS.values() for item in commands.items()):
        for example in verb.examples:
            assert example.startswith(f"pipeline {name}")
            assert understand(example.partition(" > ")[0])


def test_the_help_lists_all_commands_in_their_groups(command: Command) -> None:
    ended = command("--help")

    assert ended.code == 0
    assert re.findall(r"^│ (\w[\w-]*) |^╭─ (\w[\w ]*) ─", ended.stdout, re.MULTILINE) == [
        ("", "Options"),
        *(pair for group, names in GROUPS.items() for pair in [("", group), *((name, "") for name in names)]),
    ]
    assert "<bool>" not in ended.stdout


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--train.epochs", "3"], "train.epochs=3"),
        (["--train.epochs=3"], "train.epochs=3"),
        (["--epochs", "3"], "epochs=3"),
        (["--lr=0.2"], "lr=0.2"),
        (["--seed", "1", "--dry-run"], "seed=1"),
        (["--train.global-batch-size", "--dry-run"], "train.global_batch_size=VALUE"),
        (["--dry-run", "--", "--seed=1"], "seed=1"),
    ],
    ids=" ".join,
)
def test_a_key_with_dashes_is_told_without(command: Command, words: list[str], meant: str) -> None:
    ended = command("run", MLP, *words)

    assert (ended.code, ended.stdout) == (2, "")
    assert ended.stderr.endswith(f": not an option. Write {meant}, without dashes.\n")


def test_an_option_with_a_wrong_letter_names_the_option(command: Command) -> None:
    ended = command("run", MLP, "--quik")

    assert ended.code == 2
    assert "No such option: --quik" in ended.stderr
    assert "--quick" in ended.stderr


def test_what_needs_no_training_loads_no_heavy_library() -> None:
    code = (
        "import sys; from pipeline import cli\n"
        "for words in ['--help'], ['run', '--help'], ['schema']:\n"
        "    sys.argv = ['pipeline', *words]\n"
        "    try: cli.main()\n"
        f"    except SystemExit: print(words, sorted({set(HEAVY)!r} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert done.stderr.splitlines() == ["['--help'] []", "['run', '--help'] []", "['schema'] []"]


def test_an_unknown_command_is_a_usage_error(command: Command) -> None:
    ended = command("trian")
    assert ended.code == 2
    assert "trian" in ended.stderr


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_experiments_are_right(command: Command, path: Path) -> None:
    if path.stem == "cifar10":
        pytest.importorskip("torchvision")
    ended = command("check", "--no-data", str(path))
    assert ended.code == 0
    assert ended.stdout == f"{path}: ok\n"


def test_check_takes_values_for_its_files(command: Command) -> None:
    ended = command("check", MLP, "optimizer.lr=abc", "--no-data")
    assert ended.code == 2
    assert ended.stdout == ""
    assert ended.stderr.endswith("command line: optimizer.lr=abc: optimizer.lr: is 'abc' (a string). Write a number.\n")
    assert "name an experiment file, too: pipeline check FILE seed=1" in command("check", "seed=1").stderr


def test_check_reports_all_files_and_all_problems(command: Command, tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    text = Path(MLP).read_text().replace("epochs: 5", "epochs: five").replace("lr: 0.1", "learningrate: 0.1")
    broken.write_text(text)
    missing = tmp_path / "missing.yaml"
    missing.write_text("name: empty-handed\n")

    ended = command("check", str(broken), MLP, str(missing))

    assert ended.code == 2
    assert ended.stdout == f"{MLP}: ok\n"
    assert f"{broken}:" in ended.stderr
    assert "train.epochs" in ended.stderr
    for section in ("model", "data", "train"):
        assert f"{missing}: {section}: " in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_dry_run_prints_the_plan_and_starts_nothing(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    ended = command("run", MLP, "--dry-run", "train.global_batch_size=65", "train.gradient_accumulation=4")

    assert ended.code == 0, ended.stderr
    for fragment in (
        "experiment: mlp-digits\nseed: 17\n",
        "train_samples: 1438\nvalidation_samples: 359\nsteps_per_epoch: 23\n",
        "total_steps: 115\nepochs: 5\n",
        "  samples_per_worker: 32 or 33\n",
    ):
        assert fragment in ended.stdout
    trials = yaml.safe_load(ended.stdout)["trials"]
    assert [trial["title"] for trial in trials] == ["ddp, 2 workers", "1 worker", "1 process, 2 cores"]
    assert [trial["threads_per_worker"] for trial in trials] == [1, 1, 2]
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_without_baseline(command: Command) -> None:
    ended = command("run", MLP, "--dry-run", "--no-baseline")

    assert ended.stdout.count("launcher: torchrun") == 1
    assert "in turn with" not in ended.stdout


def test_a_dry_run_of_a_training_only(command: Command) -> None:
    ended = command("run", MLP, "--dry-run", "--train-only")

    assert ended.stdout.count("launcher: torchrun") == 1
    assert "in turn with" not in ended.stdout
    assert ended.stdout.count("--train-only: no speedup, no step-time breakdown, no recommendations") == 1
    assert "measures" not in ended.stdout
    assert "--train-only" in json.loads(command("run", MLP, "--dry-run", "--train-only", "--json").stdout)["notes"][0]


def test_a_dry_run_finds_what_a_run_would(command: Command) -> None:
    ended = command("run", MLP, "--dry-run", "parallel.launcher=inprocess")

    assert ended.code == 2
    assert "parallel.workers" in ended.stderr


def test_overrides_win(command: Command) -> None:
    ended = command("run", MLP, "--dry-run", "train.epochs=2", "seed=3", "benchmark.baseline={strategy: dp}")

    planned = yaml.safe_load(ended.stdout)
    assert (planned["seed"], planned["total_steps"]) == (3, 46)
    assert planned["trials"][1]["title"] == "dp, 1 worker"


def test_the_schema_accepts_the_experiments(command: Command) -> None:
    """Its names are those of the files, at all levels that a schema describes."""
    schema = json.loads(command("schema").stdout)

    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["additionalProperties"] is False
    for path in sorted(EXPERIMENTS.glob("*.yaml")):
        experiment = yaml.safe_load(path.read_text())
        assert experiment.keys() <= schema["properties"].keys()
        for name, section in experiment.items():
            reference = schema["properties"][name].get("$ref", "").rpartition("/")[2]
            if reference and schema["$defs"][reference]["additionalProperties"] is False:
                assert section.keys() <= schema["$defs"][reference]["properties"].keys()


def test_the_schema_explains_each_key(command: Command) -> None:
    schema = json.loads(command("schema").stdout)
    sections = {"Experiment": schema, **schema["$defs"]}

    bare = [
        f"{name}.{key}"
        for name, section in sections.items()
        for key, value in section.get("properties", {}).items()
        if "description" not in value and "$ref" not in value
    ]

    assert bare == []
    assert set(schema["properties"]) == set(Experiment.model_fields)
    assert schema["$defs"]["Parallel"]["properties"]["strategy"]["enum"] == list(registry.names("strategies"))


def test_the_ui_needs_a_free_port(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").touch()
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ended = command("ui", "--port", port, "--store", f"sqlite:///{tmp_path}/mlflow.db")
    assert ended.code == 2
    assert f"port {port}" in ended.stderr
    assert "--port" in ended.stderr


def test_the_ui_needs_a_store(command: Command, tmp_path: Path) -> None:
    ended = command("ui", "--store", f"sqlite:///{tmp_path}/none.db")
    assert ended.code == 2
    assert "no runs yet" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_sync_needs_a_run(command: Command, tmp_path: Path) -> None:
    ended = command("sync", str(tmp_path))
    assert ended.code == 2
    assert f"{tmp_path}: no such run in runs" in ended.stderr
