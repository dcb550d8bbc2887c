"""Offers and checks of the answers. The same file in each template.

Variables in cookiecutter.json call the filters. Before a question, `offered` prints the choices that fit the answers
so far. After it, `corrected` asks again until the answer is one of them. `checked` is last, for answers that were not
asked. They are filters because cookiecutter shows the message of an error in a filter, but a traceback if a hook fails
or an answer is not in one of its own lists. `pipeline new` imports this file and calls its public functions.

A setting is a variable that is not asked, because it is a key of the generated experiments. Its name in
cookiecutter.json begins with two underscores.
"""

import importlib.util
import keyword
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from cookiecutter.exceptions import FailedHookException
from cookiecutter.prompt import read_user_variable
from jinja2 import Environment
from jinja2.ext import Extension
from slugify import slugify

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
TAKEN = {
    *("src", "test", "tests", "conftest", "experiments", "docker", "notebooks"),
    *("pipeline", "torch", "torchmetrics", "ray", "mlflow", "numpy"),
}
"""Names of packages that a project has or needs, also where cookiecutter runs without them."""
STORE = re.compile(r"sqlite:///[\w./-]+|https?://[\w.-]+(:\d+)?(/[\w./-]*)?")


class Checked(Extension):
    """Extension with the filters of cookiecutter.json."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        environment.filters |= {"offered": _offered, "corrected": _corrected, "checked": _checked}


def answer(answers: Mapping[str, Any], name: str) -> str:
    """Return the answer to a question, or the value of a setting; empty if the template has neither."""
    return str(answers.get(name, answers.get(f"__{name}", "")))


def fitting(name: str, answers: Mapping[str, Any]) -> dict[str, str]:
    """Return the choices of a question that fit the other answers, with a description of each; {} for free text."""
    choices: dict[str, str] = answers["_choices"].get(name, {})
    data = TASKS.get(answer(answers, "task"), {})
    allowed = {"data": data, "model": data.get(answer(answers, "data"), ())}.get(name, choices)
    if name == "strategy" and answer(answers, "task") in WITHOUT_DP:
        allowed = [choice for choice in choices if choice != "dp"]
    return {choice: what for choice, what in choices.items() if choice in allowed}


def _is_asking() -> bool:
    """Return True if cookiecutter asks questions, which it hides from extensions; its command line has the option."""
    context = click.get_current_context(silent=True)
    return context is not None and context.params.get("no_input") is False


def _offered(answers: Mapping[str, Any], name: str) -> str:
    """Print the choices of the next question."""
    if _is_asking():
        for choice, what in fitting(name, answers).items():
            click.echo(f"    {choice:14} {what}".rstrip())
    return ""


def _corrected(answers: dict[str, Any], name: str) -> dict[str, Any]:
    """Ask for an answer again until it fits the answers before, which are kept."""
    while _is_asking() and (problem := _problem(name, answers)):
        click.echo(f"error: {problem}")
        answers[name] = read_user_variable(name, next(iter(fitting(name, answers)), "my-project"))
    return answers


def name_problem(project: str, package: str = "") -> str:
    """Return what is wrong with the name of a project, or of its package; empty if nothing is."""
    package = package or slugify(project, separator="_")
    names = {"project_name": project, "__project_slug": slugify(project), "__package_name": package}
    return next(_names(names), "")


def _problem(name: str, answers: Mapping[str, Any]) -> str:
    if name == "project_name":
        return name_problem(answers[name])
    fits = fitting(name, answers)
    return "" if answers[name] in fits else f"{name}: {answers[name]!r} is not offered; write {' or '.join(fits)}"


def _checked(answers: Mapping[str, Any]) -> str:
    if found := [*_choices(answers), *problems(answers)]:
        raise FailedHookException("\n".join(f"error: {problem}" for problem in found))
    return ""


def problems(answers: Mapping[str, str]) -> list[str]:
    """Return contradictions between answers that are allowed by themselves, each with what to write instead."""
    return [*_names(answers), *_components(answers), *_parallel(answers), *_store(answers)]


def _choices(answers: Mapping[str, Any]) -> Iterator[str]:
    for name, allowed in answers["_choices"].items():
        if (given := answer(answers, name)) not in allowed:
            yield f"{name}: {given!r} is not a choice; write one of {', '.join(allowed)}"


def _names(answers: Mapping[str, str]) -> Iterator[str]:
    project, package = answers["project_name"], answer(answers, "package_name")
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9 ._-]{0,79}", project):
        yield f"project_name: {project!r} is not a name; write letters, digits, spaces, '.', '-', '_', a letter first"
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,49}", package) or keyword.iskeyword(package):
        yield f"package_name: {package!r} is not a package name; write lowercase letters, digits, '_', a letter first"
    elif package in TAKEN or package in sys.stdlib_module_names or _installed(package):
        yield f"package_name: a package {package} exists already; write another, for instance {package}_experiments"


def _installed(package: str) -> bool:
    """Return True if the package can be imported and isn't an earlier version of a project from a template."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return False
    if spec.origin is None:  # a folder without __init__.py, such as google's; elsewhere it is any folder of the user
        folders = (Path(place).parent.name for place in spec.submodule_search_locations or ())
        return any(name in ("site-packages", "dist-packages") for name in folders)
    # pip's record of where a package came from says nothing: libraries can also be installed from a file or a folder.
    return not any((folder / ".cruft.json").is_file() for folder in Path(spec.origin).parents[1:3])


def _components(answers: Mapping[str, str]) -> Iterator[str]:
    task, data, model = (answer(answers, name) for name in ("task", "data", "model"))
    fitting = TASKS.get(task, {})
    others = [name for name, each in TASKS.items() if data in each]
    if fitting and others and data not in fitting:
        yield f"data: {task} doesn't take {data}; write {' or '.join(fitting)}, or task {' or '.join(others)}"
    elif model in MODELS and model not in (models := fitting.get(data, MODELS)):
        subject = model if task == "supervised" else f"{model} for {task}"
        other = "other data" if task == "supervised" else "another task"
        yield f"model: {subject} doesn't take {data}; write {' or '.join(models)}, or {other}"
    if answer(answers, "strategy") == "dp" and (reason := WITHOUT_DP.get(task)):
        yield f"strategy: {task} doesn't run with dp, because {reason}; write ddp or single"


def _parallel(answers: Mapping[str, str]) -> Iterator[str]:
    workers, strategy, launcher = (answer(answers, name) for name in ("workers", "strategy", "launcher"))
    if not launcher:  # the prototype has one process
        return
    if not re.fullmatch(r"[1-9]\d{0,3}", workers):
        yield f"workers: {workers!r} is not a number of workers; write 1 to 9999"
    elif workers != "1" and strategy != "ddp":
        yield f"workers: {workers}, but {strategy} is one process; write 1, or strategy ddp"
    elif workers != "1" and launcher == "inprocess":
        yield f"workers: {workers}, but inprocess runs one process; write 1, or launcher ray or torchrun"


def _store(answers: Mapping[str, str]) -> Iterator[str]:
    store = answer(answers, "mlflow_store")
    if not STORE.fullmatch(store):
        yield f"mlflow_store: {store!r} is not a valid store; write sqlite:///FILE or a server's address, http(s)://HOST:PORT"
