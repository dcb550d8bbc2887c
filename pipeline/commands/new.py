"""``pipeline new``: a project from a template, by cookiecutter's functions, with all wrong answers named at once."""

import importlib.util
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple

import click
import typer
from cookiecutter.generate import generate_context, generate_files
from cookiecutter.prompt import choose_nested_template, prompt_for_config

from pipeline.commands.options import say
from pipeline.errors import ExperimentError, Problem, UsageError
from pipeline.wording import did_you_mean

_CONTEXT = "cookiecutter.json"


class Created(NamedTuple):
    """A created project, and messages for the user."""

    folder: Path
    next_commands: str
    warning: str  # Reason why there is no first commit, or empty


def new(
    template: Annotated[
        str | None,
        typer.Argument(
            metavar="[TEMPLATE]",
            help="Template: ddp-project or dp-prototype.",
            show_default=False,
        ),
    ] = None,
    directory: Annotated[
        Path | None, typer.Argument(metavar="[FOLDER]", help="Folder of the new project.", show_default=False)
    ] = None,
    *,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Answer to a question of the template.")
    ] = None,
    no_input: Annotated[bool, typer.Option("--no-input", help="Ask no questions; answer with the defaults.")] = False,
) -> None:
    """Create a project from a template."""
    created = create(template, directory, settings or [], no_input=no_input)
    if created.warning:
        say(f"note: no first commit: {created.warning}", err=True)
    say(created.next_commands)


def create(name: str | None, directory: Path | None, settings: Sequence[str], *, no_input: bool) -> Created:
    """Create a project in ``directory``, by default in a new folder named after the project."""
    if directory is not None:
        _check_free(directory)
    try:
        template = _choose(name, no_input=no_input)
        given = _parse(settings, template)
        if directory is not None:
            given.setdefault("project_name", directory.resolve().name)
        answers = _ask(template, given, no_input=no_input)
        place = directory or Path(answers["__project_slug"])
        _check_free(place)
        place.parent.mkdir(parents=True, exist_ok=True)
        hook = _import(template / "hooks" / "post_gen_project.py")
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".pipeline-new-") as folder:
            context = {"cookiecutter": answers}
            written = generate_files(repo_dir=template, context=context, output_dir=folder, accept_hooks=False)
            hook.finish(Path(written), answers, template)
            Path(written).rename(place)
    except (EOFError, click.Abort):
        raise UsageError(
            "the questions were not answered; add --no-input for the defaults, and --set KEY=VALUE"
        ) from None
    except OSError as error:
        raise UsageError(f"{directory}: can't be written: {error.strerror}; name another directory") from error
    return Created(place, hook.next_commands(os.path.relpath(place)), hook.commit(place, template.name))


def root() -> Path:
    """Return the folder of the templates: in the installed package, or next to it in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "_templates"
    return installed if installed.is_dir() else package.parent / "templates"


def questions(template: Path) -> dict[str, tuple[str, ...]]:
    """Return the questions with the allowed answers, the default first; an empty tuple allows any text."""
    asked = {key: value for key, value in _read(template / _CONTEXT).items() if not key.startswith("_")}
    return {key: tuple(value) if isinstance(value, list) else () for key, value in asked.items()}


def _choose(name: str | None, *, no_input: bool) -> Path:
    listed = _read(root() / _CONTEXT)
    if name is None:
        return Path(choose_nested_template({"cookiecutter": listed}, root(), no_input=no_input)).resolve()
    if name not in listed["templates"]:
        known = listed["templates"]
        raise UsageError(f"{name}: no such template{did_you_mean(name, known)}; choose one of {', '.join(known)}")
    return Path(root(), listed["templates"][name]["path"]).resolve()


def _parse(settings: Sequence[str], template: Path) -> dict[str, str]:
    asked, answers, problems = questions(template), dict[str, str](), []
    for setting in settings:
        key, equals, value = setting.partition("=")
        message = ""
        if not equals:
            message = f"no value; write --set {key}=VALUE"
        elif key not in asked:
            hint, known = did_you_mean(key, asked), ", ".join(asked)
            message = f"{template.name} has no question {key}{hint}; its questions are {known}"
        elif (allowed := asked[key]) and value not in allowed:
            hint = did_you_mean(value, allowed)
            message = f"{value!r} is not a choice{hint}; choose one of {', '.join(allowed)}"
        problems += [Problem("", message, f"--set {setting}")] if message else []
        answers[key] = value
    if problems:
        raise ExperimentError(problems)
    return answers


def _ask(template: Path, given: Mapping[str, str], *, no_input: bool) -> dict[str, Any]:
    """Ask the questions that have no answer yet, the name first; return all answers with what derives from them."""
    asked = dict(_read(template / _CONTEXT))
    naming = _import(template / "hooks" / "pre_gen_project.py")
    answers = dict(given)
    for key in questions(template):
        if key not in answers:
            prompts = asked.get("__prompts__", {})
            answers |= prompt_for_config({"cookiecutter": {"__prompts__": prompts, key: asked[key]}}, no_input)
            answers.pop("__prompts__", None)
        context = generate_context(template / _CONTEXT, extra_context=answers)
        complete: dict[str, Any] = dict(prompt_for_config(context, no_input=True))
        if problem := naming.name_problem(complete["project_name"], complete["__package_name"]):
            raise UsageError(problem)  # at once, not after the other questions
    return {key: value for key, value in complete.items() if key != "__prompts__"}


def _import(path: Path) -> ModuleType:
    """Import a hook of the template, whose functions work without cookiecutter, too."""
    spec = importlib.util.spec_from_file_location(f"_{path.parent.parent.stem}_{path.stem}".replace("-", "_"), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def _check_free(place: Path) -> None:
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        what = "exists and isn't empty" if place.is_dir() else "is a file"
        raise UsageError(f"{place}: {what}; name another directory")
