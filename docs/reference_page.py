"""Writer of docs/reference.md below its line `BEGIN`, from the code; make schema calls it. What is above stays.

The page is committed, so that reviews show a changed option. A test holds that it is up to date.
"""

import ast
import inspect
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipeline import api, errors
from pipeline.cli import GROUPS, load_verb

PAGE = Path(__file__).with_name("reference.md")
BEGIN = "<!-- make schema writes all that follows -->\n"
SHARED = 3  # commands from which an option stands in one table for all of them
CLASSES = (api.Experiment, api.Parts, api.Result, api.RunResult, api.BenchmarkResult, api.Trained)


def page() -> str:
    """Return the whole page."""
    by_hand = PAGE.read_text(encoding="utf-8").partition(BEGIN)[0]
    return "\n".join([f"{by_hand}{BEGIN}", *_commands(), *_exit_codes(), *_python(), ""])


def _commands() -> Iterator[str]:
    verbs = {name: load_verb(name) for group in GROUPS.values() for name in group}
    known = {_format_option(option): option for verb in verbs.values() for option in verb.params}
    counts = Counter((_format_option(option), option.help) for verb in verbs.values() for option in verb.params)
    shared = {written: text for (written, text), count in counts.items() if count >= SHARED}
    yield from ("## Commands and options", "", "`--help` after a command explains its options, with examples.")
    yield from _head("several commands", "meaning")
    yield from (_row(written, f"{text}{_format_default(known[written])}") for written, text in shared.items())
    yield from _head("command", "purpose", "other options")
    for name, verb in verbs.items():
        usage = " ".join([f"pipeline {name}", *verb.collect_usage_pieces(None)[1:]])
        options = [one for one in verb.params if one.param_type_name == "option"]
        others = [_format_option(one) for one in options if shared.get(_format_option(one)) != one.help]
        yield _row(f"`{usage}`", verb.help, ", ".join(others))


def _format_option(option: Any) -> str:
    """Return an option or argument with its value, as code."""
    metavar = option.metavar or option.name.upper()
    if option.param_type_name == "argument":
        return f"`{metavar}`"
    value = "" if option.is_flag else f" {metavar}"
    return ", ".join(f"`{name}{value}`" for name in (*option.opts, *option.secondary_opts))


def _format_default(option: Any) -> str:
    is_needless = option.param_type_name == "argument" or option.is_flag or option.default in (None, "")
    return "" if is_needless else f" Default: `{option.default}`."


def _exit_codes() -> Iterator[str]:
    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind) and errors.PipelineError in kind.__bases__]
    yield from ("", "## Exit codes", *_head("code", "exception", "meaning"), _row("0", "", "Success."))
    for kind in sorted(kinds, key=lambda kind: kind.exit_code):
        yield _row(str(kind.exit_code), f"`{kind.__name__}`", _summarize(kind.__doc__))


def _python() -> Iterator[str]:
    yield from ("", "## Python functions and classes", "")
    yield "All of these are imported from `pipeline`; `help(pipeline.run)` explains the arguments."
    yield from _head("function or class", "purpose", "attributes and methods")
    for function in (api.run, api.benchmark):
        yield _row(f"`{function.__name__}{_without_types(function)}`", _summarize(function.__doc__), "")
    for kind in CLASSES:
        bases = "".join(f"({base.__name__})" for base in kind.__bases__ if base in CLASSES)
        yield _row(
            f"`{kind.__name__}{bases}`", _summarize(kind.__doc__), ", ".join(f"`{one}`" for one in _members(kind))
        )


def _members(kind: type) -> Iterator[str]:
    """Yield the documented attributes of a class, and its methods with their arguments."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef))
    for node, following in pairwise([*body, ast.Pass()]):
        match node, following:
            case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str())):
                yield name
            case ast.FunctionDef(name), _ if not name.startswith("_") and name != "of":
                member = getattr(kind, name)
                yield name if isinstance(member, property) else f"{name}{_without_types(member)}"


def _without_types(function: Any) -> inspect.Signature:
    signature = inspect.signature(function)
    parameters = [one.replace(annotation=one.empty) for one in signature.parameters.values() if one.name != "self"]
    return signature.replace(parameters=parameters, return_annotation=signature.empty)


def _summarize(docstring: str | None) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join(inspect.cleandoc(docstring or "").partition("\n\n")[0].split()).replace("``", "`")


def _head(*cells: str) -> tuple[str, ...]:
    return ("", _row(*cells), "|---" * len(cells) + "|")


def _row(*cells: str) -> str:
    return "".join(["|", *(f" {cell}".replace("|", "\\|") + " |" for cell in cells)])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
