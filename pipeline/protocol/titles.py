"""Titles of trials, as tables and progress lines show them; those of earlier versions are translated when read."""

import re
from typing import Annotated

from pydantic import BeforeValidator

from pipeline.wording import format_parallel

_EARLIER = re.compile(r"(?P<strategy>\w+)(?: x (?P<replicas>\d+))?(?P<remarks> \(.*\))?")


def translate_title(title: str) -> str:
    """Return the title of a trial as it is today, e.g. for "ddp x 2 (weak)" of a run of an earlier version."""
    if (parts := _EARLIER.fullmatch(title)) is None:
        return re.sub(r"^single, (?=\d+ cores?$)", "1 process, ", title)
    strategy, number = parts["strategy"], int(parts["replicas"] or 1)
    size = {"devices": number, "workers": 1} if strategy == "dp" else {"workers": number}
    return f"{format_parallel(strategy, **size)}{parts['remarks'] or ''}"


Title = Annotated[str, BeforeValidator(translate_title)]
