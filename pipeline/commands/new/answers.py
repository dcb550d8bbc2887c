"""Answers to a template's questions: from ``--set``, from an existing project, or from prompts."""

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import click
from cookiecutter.exceptions import CookiecutterException
from cookiecutter.generate import generate_context
from cookiecutter.prompt import prompt_choice_for_config, read_user_choice, read_user_variable, render_variable
from cookiecutter.utils import create_env_with_context

from pipeline.commands.new import catalog
from pipeline.commands.new.catalog import Template
from pipeline.errors import UsageError
from pipeline.wording import did_you_mean

Answers = Mapping[str, str]
"""Answers by question, and values that the template derives from them, whose names begin with an underscore."""


def parse(settings: Sequence[str], template: Template) -> dict[str, str]:
    """Parse and check answers given as ``key=value``.

    Raises:
        UsageError: lists every unknown question and every value that is not allowed.
    """
    questions = template.questions()
    answers, problems = {}, []
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            problems.append(f"--set {setting}: no value; write --set {key}=VALUE")
        elif key not in questions:
            hint = did_you_mean(key, questions)
            asked = template.question_names()
            known = f"{', '.join(asked)}; its settings are {', '.join(name for name in questions if name not in asked)}"
            problems.append(f"--set {setting}: {template.name} has no question {key}{hint}; its questions are {known}")
        elif problem := _not_allowed(value, questions[key]):
            problems.append(f"--set {setting}: {problem}")
        answers[key] = value
    if problems:
        raise UsageError("\n".join(problems))
    return answers


def still_asked(answers: Answers, template: Template) -> dict[str, str]:
    """Return an existing project's answers to the questions that the template still asks.

    Raises:
        UsageError: an answer is no longer allowed.
    """
    questions = template.questions()
    kept = {name: value for key, value in answers.items() if (name := catalog.name_of(key)) in questions}
    problems = {key: _not_allowed(value, questions[key]) for key, value in kept.items()}
    if wrong := [
        f"{key}: {problem}; answer again with --set {key}=..." for key, problem in problems.items() if problem
    ]:
        raise UsageError("\n".join(wrong))
    return kept


def choose(*, no_input: bool) -> Template:
    """Prompt for a template; with ``no_input``, return the first.

    Raises:
        UsageError: input ended before an answer.
    """
    known = {name: f"{name}: {catalog.find(name).description}" for name in catalog.names()}
    if no_input or len(known) == 1:
        return catalog.find(next(iter(known)))
    try:
        env, prompts = create_env_with_context({}), {"template": {"__prompt__": "Template", **known}}
        return catalog.find(prompt_choice_for_config({}, env, "template", list(known), no_input=False, prompts=prompts))
    except (EOFError, click.Abort):
        raise _nobody() from None


def complete(template: Template, given: Answers, *, no_input: bool) -> dict[str, str]:
    """Ask the remaining questions; with ``no_input``, use the template's defaults.

    Raises:
        UsageError: input ended before an answer, or answers contradict each other; lists all problems.
    """
    extension = template.module("local_extensions.py")
    try:
        variables = generate_context(context_file=str(template.context_file))["cookiecutter"]
        titles, choices = variables.get("__prompts__", {}), {catalog.CHOICES: template.choices()}
        env = create_env_with_context({})
        answers: dict[str, str] = {}
        for key, default in variables.items():
            name = catalog.name_of(key)
            if not name and key != "__project_slug":
                continue
            answers[key] = given[name] if name in given else render_variable(env, default, answers)
            if not key.startswith("_") and name not in given and not no_input:
                answers[key] = _ask(key, answers | choices, title=titles.get(key, key), extension=extension)
            is_named = name == "package_name" and not no_input
            if is_named and (problem := extension.name_problem(answers["project_name"], answers[key])):
                raise UsageError(problem)  # at once, not after the other questions
    except (EOFError, click.Abort):
        raise _nobody() from None
    except CookiecutterException as error:
        raise UsageError(f"the template {template.name} is broken: {error}") from error
    if problems := template.problems(answers):
        raise UsageError("\n".join(problems))
    return answers


def _ask(key: str, answers: Mapping[str, Any], *, title: str, extension: ModuleType) -> str:
    """Ask a question, whose default is among the answers; offer only what fits the answers before."""
    fitting: dict[str, str] = extension.fitting(key, answers)
    if not fitting:
        return _ask_text(key, answers[key], title=title, find_problem=extension.name_problem)
    if len(fitting) == 1:
        return next(iter(fitting))
    ordered = sorted(fitting, key=lambda choice: choice != answers[key])  # cookiecutter takes the first as the default
    menu = {choice: f"{choice}: {what}" if what else choice for choice, what in fitting.items()}
    chosen: str = read_user_choice(key, ordered, {key: {"__prompt__": title, **menu}})
    return chosen


def _ask_text(key: str, default: str, *, title: str, find_problem: Callable[[str], str]) -> str:
    text: str = read_user_variable(key, default, {key: title})
    while problem := find_problem(text):
        click.echo(f"error: {problem}")
        text = read_user_variable(key, default, {key: title})
    return text


def _not_allowed(value: str, allowed: Sequence[str]) -> str:
    if not allowed or value in allowed:
        return ""
    return f"{value!r} is not a choice{did_you_mean(value, allowed)}; choose one of {', '.join(allowed)}"


def _nobody() -> UsageError:
    return UsageError("the questions were not answered; add --no-input for the defaults, and --set KEY=VALUE")
