"""Answers to a template's questions: from ``--set``, from an existing project, or from prompts."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import click
from cookiecutter.exceptions import CookiecutterException
from cookiecutter.generate import generate_context
from cookiecutter.prompt import prompt_choice_for_config, prompt_for_config
from cookiecutter.utils import create_env_with_context

from pipeline.commands.new import catalog
from pipeline.commands.new.catalog import Template
from pipeline.errors import UsageError
from pipeline.wording import did_you_mean

_COOKIECUTTERS = (catalog.CHOICES, "_extensions", "__checked")
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
            known = ", ".join(questions)
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
    kept = {key: value for key, value in answers.items() if key in questions}
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
    """Prompt for the remaining answers; with ``no_input``, use the template's defaults.

    Raises:
        UsageError: input ended before an answer, or answers contradict each other; lists all problems.
    """
    try:
        context = generate_context(context_file=str(template.context_file), extra_context=dict(given))
        answers = dict(prompt_for_config(_with_menus(context, template), no_input=no_input))
    except (EOFError, click.Abort):
        raise _nobody() from None
    except CookiecutterException as error:
        raise UsageError(f"the template {template.name} is broken: {error}") from error
    if problems := template.problems(answers):
        raise UsageError("\n".join(problems))
    return answers


def _with_menus(context: Mapping[str, Any], template: Template) -> dict[str, Any]:
    """Add a menu to each question with choices; remove cookiecutter's private variables."""
    asked = {key: value for key, value in context["cookiecutter"].items() if key not in _COOKIECUTTERS}
    prompts = asked.get("__prompts__", {})
    for key, choices in template.choices().items():
        asked[key] = _default_first(choices, default=asked[key])
        title = str(prompts.get(key, key)).rpartition(": ")[0]
        prompts[key] = {"__prompt__": title} | {
            each: f"{each}: {what}" if what else each for each, what in choices.items()
        }
    return {"cookiecutter": asked}


def _default_first(choices: Collection[str], *, default: str) -> list[str]:
    """Return Jinja templates of the choices, as cookiecutter takes the first for the default, itself a template."""
    first = f"{{% set default %}}{default}{{% endset %}}"
    ordered = f"([default] + {list(choices)} | reject('eq', default) | list)"
    return [f"{first}{{{{ {ordered}[{number}] }}}}" for number, _ in enumerate(choices)]


def _not_allowed(value: str, allowed: Sequence[str]) -> str:
    if not allowed or value in allowed:
        return ""
    return f"{value!r} is not a choice{did_you_mean(value, allowed)}; choose one of {', '.join(allowed)}"


def _nobody() -> UsageError:
    return UsageError("the questions were not answered; add --no-input for the defaults, and --set KEY=VALUE")
