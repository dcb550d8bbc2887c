"""Address of the tracking store: ``tracking.uri``, else the variable MLFLOW_TRACKING_URI, else a file."""

import os
from collections.abc import Iterator
from typing import Any

from pipeline.errors import Problem
from pipeline.experiment.uris import problem_of, without_credentials

DEFAULT = "sqlite:///mlflow.db"
VARIABLE = "MLFLOW_TRACKING_URI"


def default_address() -> str:
    """Return the address for an experiment without ``tracking.uri``."""
    return os.environ.get(VARIABLE) or DEFAULT


def describe_origin(uri: str, *, is_set: bool) -> str:
    """Describe where an address comes from; ``is_set`` is True if ``tracking.uri`` has a value."""
    if uri == os.environ.get(VARIABLE):
        return VARIABLE
    return "tracking.uri" if is_set else "default"


def fill_in(tree: dict[str, Any]) -> Iterator[Problem]:
    """Have ``tracking.uri`` refer to the variable if the file does not set the key; yield what is wrong with it.

    It is a reference, as a file may have one, so that a job on a cluster reads the variable too.
    """
    section = tree.get("tracking", {})
    if not os.environ.get(VARIABLE) or not isinstance(section, dict) or "uri" in section:
        return
    uri = os.environ[VARIABLE]
    if problem := problem_of(uri):
        message = f"not set, so {VARIABLE} is used. It is {without_credentials(uri)}; {problem}"
        yield Problem("tracking.uri", message)
    else:
        tree["tracking"] = {**section, "uri": f"${{oc.env:{VARIABLE}}}"}
