"""Checks of the answers. The same file in each template.

The last variable in cookiecutter.json calls the filter, because cookiecutter shows the message of an error in a filter,
but a traceback if a hook fails or an answer is not in one of its own lists. `pipeline new` imports this file and calls
`problems`.
"""

import importlib.util
import keyword
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from cookiecutter.exceptions import FailedHookException
from jinja2 import Environment
from jinja2.ext import Extension

IMAGES = dict.fromkeys(("digits", "cifar10", "image_folder", "own"), ("resnet", "transformer", "mlp", "own"))
TABLES = dict.fromkeys(("table", "table_classes"), ("mlp", "own"))
TASKS = {
    "supervised": {**IMAGES, **TABLES, "text": ("transformer", "own")},
    "finetune": {"text_classes": ("pretrained",)},
    "gan": {"image_folder": ("dcgan",)},
    "contrastive": IMAGES,
}
"""Data that a task takes, and the models that take the data."""
MODELS = {model for data in TASKS.values() for models in data.values() for model in models}
WITHOUT_DP = {
    "finetune": "each GPU's model would return a mean loss of its own",
    "gan": "dp calls the whole model, not its parts",
}
TAKEN = {"pipeline", "src", "test", "tests", "conftest", "experiments", "docker", "notebooks"}
STORE = re.compile(r"sqlite:///[\w./-]+|https?://[\w.-]+(:\d+)?(/[\w./-]*)?")


class Checked(Extension):
    """Extension with the filter `checked`, which checks all answers and returns an empty text."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        environment.filters["checked"] = _checked


def _checked(answers: Mapping[str, Any]) -> str:
    if found := [*_choices(answers), *problems(answers)]:
        raise FailedHookException("\n".join(f"error: {problem}" for problem in found))
    return ""


def problems(answers: Mapping[str, str]) -> list[str]:
    """Return contradictions between answers that are allowed by themselves, each with what to write instead."""
    return [*_names(answers), *_components(answers), *_parallel(answers), *_store(answers)]


def _choices(answers: Mapping[str, Any]) -> Iterator[str]:
    for key, allowed in answers["_choices"].items():
        if answers[key] not in allowed:
            yield f"{key}: {answers[key]!r} is not a choice; write one of {', '.join(allowed)}"


def _names(answers: Mapping[str, str]) -> Iterator[str]:
    project, package = answers["project_name"], answers["package_name"]
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9 ._-]{0,79}", project):
        yield f"project_name: {project!r} is no name; write letters, digits, spaces, '.', '-' and '_', a letter first"
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,49}", package) or keyword.iskeyword(package):
        yield f"package_name: {package!r} is no package name; write lowercase letters, digits and '_', a letter first"
    elif package in TAKEN or package in sys.stdlib_module_names or _installed(package, answers["__project_slug"]):
        yield f"package_name: a package {package} is there already; write another, for instance {package}_experiments"


def _installed(package: str, project: str) -> bool:
    """Return True if the package can be imported and isn't an earlier version of this project."""
    try:
        metadata.distribution(project)
    except (metadata.PackageNotFoundError, ValueError):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:  # a folder without __init__.py has no origin
            return False
        here = Path.cwd()  # when the project is updated, these folders have its own package
        return Path(spec.origin).parent.parent not in {here, here / "src"}
    return False


def _components(answers: Mapping[str, str]) -> Iterator[str]:
    task, data, model = (answers.get(key, "") for key in ("task", "data", "model"))
    fitting = TASKS.get(task, {})
    others = [name for name, each in TASKS.items() if data in each]
    if fitting and others and data not in fitting:
        yield f"data: {task} doesn't take {data}; write {' or '.join(fitting)}, or task {' or '.join(others)}"
    elif model in MODELS and model not in (models := fitting.get(data, MODELS)):
        subject = model if task == "supervised" else f"{model} for {task}"
        other = "other data" if task == "supervised" else "another task"
        yield f"model: {subject} doesn't take {data}; write {' or '.join(models)}, or {other}"
    if answers["strategy"] == "dp" and (reason := WITHOUT_DP.get(task)):
        yield f"strategy: {task} doesn't run with dp, because {reason}; write ddp or single"


def _parallel(answers: Mapping[str, str]) -> Iterator[str]:
    if "workers" not in answers:
        return
    workers, strategy, launcher = (answers[key] for key in ("workers", "strategy", "launcher"))
    if not re.fullmatch(r"[1-9]\d{0,3}", workers):
        yield f"workers: {workers!r} is no number of workers; write 1 to 9999"
    elif workers != "1" and strategy != "ddp":
        yield f"workers: {workers}, but {strategy} is one process; write 1, or strategy ddp"
    elif workers != "1" and launcher == "inprocess":
        yield f"workers: {workers}, but inprocess runs one process; write 1, or launcher ray or torchrun"


def _store(answers: Mapping[str, str]) -> Iterator[str]:
    store = answers["mlflow_store"]
    if not STORE.fullmatch(store):
        yield f"mlflow_store: {store!r} is no store; write sqlite:///FILE or a server's address, http(s)://HOST:PORT"
