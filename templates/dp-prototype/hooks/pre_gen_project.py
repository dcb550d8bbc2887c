"""Refuses answers that don't make a project. The same file in each template; needs nothing but Python.

Cookiecutter renders it and runs it before anything is written; `pipeline new` imports it as it is and calls `problems`.
"""

import importlib.util
import json
import keyword
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

ANSWERS = r'''{{ cookiecutter | jsonify | replace("'", "\\u0027") }}'''

MODELS = {"text": ("transformer", "own")}
"""Models that go with the data; all go with images."""
TAKEN = {"pipeline", "src", "test", "tests", "conftest", "experiments", "docker", "notebooks"}
STORE = re.compile(r"sqlite:///[\w./-]+|https?://[\w.-]+(:\d+)?(/[\w./-]*)?")


def problems(answers: Mapping[str, str]) -> list[str]:
    """What is wrong with the answers, each with what to write instead."""
    return [*_names(answers), *_components(answers), *_parallel(answers), *_store(answers)]


def _names(answers: Mapping[str, str]) -> Iterator[str]:
    project, package = answers["project_name"], answers["package_name"]
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9 ._-]{0,79}", project):
        yield f"project_name: {project!r} is no name; write letters, digits, spaces, '.', '-' and '_', a letter first"
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,49}", package) or keyword.iskeyword(package):
        yield f"package_name: {package!r} is no package name; write lowercase letters, digits and '_', a letter first"
    elif package in TAKEN or package in sys.stdlib_module_names or _installed(package, answers["__project_slug"]):
        yield f"package_name: a package {package} is there already; write another, for instance {package}_experiments"


def _installed(package: str, project: str) -> bool:
    """Whether it can be imported here, unless that is an earlier version of this project."""
    try:
        metadata.distribution(project)
    except (metadata.PackageNotFoundError, ValueError):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:  # a mere folder of that name has no origin
            return False
        here = Path.cwd()  # the project's own, if it is updated: pipeline finds code in these two folders
        return Path(spec.origin).parent.parent not in {here, here / "src"}
    return False


def _components(answers: Mapping[str, str]) -> Iterator[str]:
    data, model = answers.get("data", ""), answers.get("model", "")
    allowed = MODELS.get(data)
    if allowed and model not in allowed:
        yield f"model: {model} doesn't take {data}; write {' or '.join(allowed)}, or other data"


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


if __name__ == "__main__":
    found = problems(json.loads(ANSWERS))
    print(*(f"error: {problem}" for problem in found), sep="\n", end="\n" if found else "", file=sys.stderr)
    sys.exit(2 if found else 0)
