"""Rendering of a template, shared by ``create`` and ``update``."""

from pathlib import Path

from cookiecutter.exceptions import CookiecutterException
from cookiecutter.generate import generate_files
from jinja2 import TemplateError

from pipeline.commands.new.answers import Answers
from pipeline.commands.new.catalog import Template
from pipeline.errors import UsageError


def render(template: Template, answers: Answers, *, into: Path, source: str = "") -> Path:
    """Render the project as a new folder inside ``into``; return that folder.

    ``source`` is the requirement that the project installs ddp-pipeline from, used if it cannot be detected.

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
    origin = hook.find_origin(template.folder)
    hook.finish(project, answers, origin if origin.source else origin._replace(source=source))
    return project
