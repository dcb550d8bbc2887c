"""Answers to a template's questions: from ``--set``, or from prompts."""

from collections.abc import Mapping, Sequence

import click
from cookiecutter.exceptions import CookiecutterException
from cookiecutter.prompt import prompt_choice_for_config, read_user_choice, read_user_variable, render_variable
from cookiecutter.utils import create_env_with_context

from pipeline.commands.new import catalog
from pipeline.commands.new.catalog import Template
from pipeline.errors import UsageError
from pipeline.wording import did_you_mean

Answers = Mapping[str, str]
"""Answers by question, and values that the template derives from them, whose names begin with two underscores."""


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
            known = ", ".join(questions)
            problems.append(f"--set {setting}: {template.name} has no question {key}{hint}; its questions are {known}")
        elif (allowed := questions[key]) and value not in allowed:
            hint = did_you_mean(value, allowed)
            problems.append(f"--set {setting}: {value!r} is not a choice{hint}; choose one of {', '.join(allowed)}")
        answers[key] = value
    if problems:
        raise UsageError("\n".join(problems))
    return answers


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
        UsageError: input ended before an answer, or the project can't have its name.
    """
    answers = {}
    try:
        for key, allowed in template.questions().items():
            if key in given:
                answers[key] = given[key]
            elif no_input:
                answers[key] = allowed[0] if allowed else str(template.variables()[key])
            else:
                answers[key] = _ask(template, key, allowed)
            if key == "project_name" and (problem := _name_problem(template, answers[key])):
                raise UsageError(problem)  # at once, not after the other questions
        return answers | _derived(template, answers)
    except (EOFError, click.Abort):
        raise _nobody() from None
    except CookiecutterException as error:
        raise UsageError(f"the template {template.name} is broken: {error}") from error


def _ask(template: Template, key: str, allowed: Sequence[str]) -> str:
    prompts = template.variables().get("__prompts__", {})
    if allowed:
        chosen: str = read_user_choice(key, list(allowed), prompts)
        return chosen
    text: str = read_user_variable(key, template.variables()[key], prompts)
    while problem := _name_problem(template, text):
        click.echo(f"error: {problem}")
        text = read_user_variable(key, template.variables()[key], prompts)
    return text


def _derived(template: Template, answers: Answers) -> dict[str, str]:
    """Render the template's private variables."""
    env = create_env_with_context({})
    private = {
        key: value for key, value in template.variables().items() if key.startswith("__") and key != "__prompts__"
    }
    return {key: str(render_variable(env, value, answers)) for key, value in private.items()}


def _name_problem(template: Template, name: str) -> str:
    package = _derived(template, {"project_name": name})["__package_name"]
    problem: str = template.module("hooks/pre_gen_project.py").name_problem(name, package)
    return problem


def _nobody() -> UsageError:
    return UsageError("the questions were not answered; add --no-input for the defaults, and --set KEY=VALUE")
