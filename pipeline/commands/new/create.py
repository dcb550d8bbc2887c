"""Creating a project: a template is rendered in a temporary folder, then moved to its place."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cookiecutter.exceptions import CookiecutterException
from cookiecutter.generate import generate_files
from jinja2 import TemplateError

from pipeline.commands.new import answers, catalog
from pipeline.commands.new.answers import Answers
from pipeline.commands.new.catalog import Template
from pipeline.errors import UsageError


def _render(template: Template, answers: Answers, *, into: Path) -> Path:
    """Render the project as a new folder inside ``into``; return that folder.

    Raises:
        UsageError: the template is broken.
    """
    context = {"cookiecutter": dict(answers)}
    try:
        written = generate_files(repo_dir=template.folder, context=context, output_dir=into, accept_hooks=False)
    except (CookiecutterException, TemplateError) as error:
        raise UsageError(f"the template {template.name} is broken: {error}") from error
    project = Path(written)
    hook = template.finishing()
    hook.finish(project, answers, hook.find_source(template.folder))
    return project


class Created(NamedTuple):
    """A created project, and messages for the user."""

    folder: Path
    next_commands: str
    warning: str
    """Reason why there is no first commit, or empty."""


def create(name: str | None, directory: Path | None, settings: Sequence[str], *, no_input: bool) -> Created:
    """Create a project in ``directory``, by default in a new folder named after the project.

    Raises:
        UsageError: the template is unknown, an answer is wrong, or the directory is not empty; nothing was written.
    """
    if directory is not None:
        _check_free(directory)
    template = answers.choose(no_input=no_input) if name is None else catalog.find(name)
    given = answers.parse(settings, template)
    if directory is not None:
        given.setdefault("project_name", directory.resolve().name)
    complete = answers.complete(template, given, no_input=no_input)
    place = directory or Path(complete["__project_slug"])
    _check_free(place)
    hook = template.finishing()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".pipeline-new-") as folder:
            _render(template, complete, into=Path(folder)).rename(place)
    except OSError as error:
        raise UsageError(f"{place}: can't be written: {error.strerror}; name another directory") from error
    warning = hook.commit(place, template.name)
    return Created(place, hook.next_commands(os.path.relpath(place)), warning or "")


def _check_free(place: Path) -> None:
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        what = "exists and isn't empty" if place.is_dir() else "is a file"
        raise UsageError(f"{place}: {what}; name another directory")
