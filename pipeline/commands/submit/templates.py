"""Rendering of the Jinja templates in this folder."""

import json
from functools import partial
from importlib.resources import files

from jinja2 import Environment, StrictUndefined


def fill(template: str, /, **values: object) -> str:
    """Render a template; the filter ``quoted`` writes a value as a YAML string."""
    environment = Environment(  # noqa: S701 - no HTML: values are quoted for YAML or the shell
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="{%#",  # {# has a meaning in the shell
        comment_end_string="#%}",
    )
    environment.filters["quoted"] = partial(json.dumps, ensure_ascii=False)
    return environment.from_string(files("pipeline.commands.submit").joinpath(template).read_text("utf-8")).render(
        values
    )
