"""Provenance of a run: code, configuration, hardware and installed packages."""

import getpass
import os
import platform
import shlex
import subprocess
import sys
from email.parser import HeaderParser
from importlib.metadata import distributions
from pathlib import Path

from pipeline.experiment.load import config_hash, to_yaml
from pipeline.experiment.schema import Experiment
from pipeline.experiment.uris import without_credentials_in
from pipeline.plan.outer_launcher import outer_launcher
from pipeline.plan.plan import Plan
from pipeline.protocol.trial import Training, Trial
from pipeline.record.folder import ENVIRONMENT_NAME, EXPERIMENT_NAME, write_atomically


def command() -> str:
    """Return the shell command of this process, without credentials in URIs; empty unless it is ``pipeline`` alone."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    if name != "pipeline" or outer_launcher() is not None:
        return ""
    return shlex.join(["pipeline", *map(without_credentials_in, sys.argv[1:])])


def run_tags(plan: Plan) -> dict[str, str]:
    """Return the tags of the main run; those that people read come first, as MLflow shows them in this order."""
    commit = git("rev-parse", "HEAD")
    return {
        **plan.experiment.tracking.tags,
        **(_placement(plan.main) if plan.command in ("run", "sweep") else {}),  # a sweep's trials are all placed alike
        "hardware": hardware(plan),
        **({"git_commit": commit, "git_dirty": str(bool(git("status", "--porcelain"))).lower()} if commit else {}),
        "user": getpass.getuser(),
        "python": platform.python_version(),
        "config_hash": config_hash(plan.experiment),
        **({"quick": "true"} if isinstance(plan.main, Training) and plan.main.is_quick else {}),
        "role": plan.main.role if plan.command == "run" else plan.command,
    }


def trial_tags(trial: Trial) -> dict[str, str]:
    """Return the tags of one trial."""
    return {**_placement(trial), "role": trial.role}


def trial_params(trial: Trial) -> dict[str, str]:
    """Return the parameters of one trial. They are immutable in MLflow, so an elastic size is a tag and a metric."""
    left_out = "world_size" if trial.is_elastic else ""
    return {f"trial.{name}": value for name, value in trial_tags(trial).items() if name != left_out}


def _placement(trial: Trial) -> dict[str, str]:
    return {
        "strategy": trial.strategy,
        "world_size": str(trial.workers),
        "launcher": trial.launcher,
        "device": trial.device,
        "cpus_per_worker": str(trial.cpus_per_worker),
    }


def hardware(plan: Plan) -> str:
    """Describe the machine in one line."""
    return ", ".join(filter(None, (plan.resources.processor, plan.resources.summary)))


def describe(experiment: Experiment, folder: Path) -> tuple[str, ...]:
    """Write the experiment and the environment into a run's folder; return the names of the files."""
    write_atomically(folder / EXPERIMENT_NAME, to_yaml(experiment))
    write_atomically(folder / ENVIRONMENT_NAME, list_packages())
    return EXPERIMENT_NAME, ENVIRONMENT_NAME


def list_packages() -> str:
    """Return Python, platform and the installed packages in pip's format, without those vendored by Ray."""
    vendored = tuple(f"{place}{os.sep}ray{os.sep}" for place in sys.path if place)
    packages = set[str]()
    for package in distributions(path=[place for place in sys.path if not place.startswith(vendored)]):
        # Not package.metadata, which also parses the description; that is slow.
        headers = HeaderParser().parsestr(package.read_text("METADATA") or package.read_text("PKG-INFO") or "")
        if headers["Name"]:
            packages.add(f"{headers['Name']}=={headers['Version']}")
    lines = [f"# python {platform.python_version()}, {platform.platform()}", *sorted(packages, key=str.lower)]
    return "\n".join(lines) + "\n"


def git(*arguments: str, folder: Path | None = None) -> str:
    """Return the output of a git command; empty without git or outside a repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=False)  # noqa: S603, S607 - the user's own git
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
