"""Keeping secrets out of what is shown and written down: in addresses, and in values that come from the environment.

A secret from the environment, such as ``${oc.env:API_KEY}`` among a component's arguments, stands in an `Experiment` as
it does in the file. A worker puts the value in when it builds the component, so it is nowhere else.
"""

import os
import re
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from pipeline.errors import ExperimentError

SECRET = re.compile(r"pass|pwd|secret|token|key", re.IGNORECASE)
"""Names of a query's parameters whose values are nobody else's business."""
_REFERENCE = re.compile(
    r"(?<!\\)\$\{oc\.env:\s*(\w*(?:KEY|TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIAL)S?(?:_\w*)?)\s*(?:,([^{}]*))?\}", re.I
)


def without_credentials(uri: str) -> str:
    """The URI as it may be shown and written down: user name and password removed."""
    parts = urlsplit(uri)
    if parts.netloc and SECRET.search(parts.query):  # databases take them there, too
        kept = [(name, value) for name, value in parse_qsl(parts.query) if not SECRET.search(name)]
        parts = parts._replace(query=urlencode(kept))
    elif "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def named_in(text: str) -> tuple[str, ...]:
    """Names of the environment variables in a text that hold secrets, e.g. of ``${oc.env:HF_TOKEN}``."""
    return tuple(found[1] for found in _REFERENCE.finditer(text))


def held_back(text: str) -> str:
    """The text in which OmegaConf leaves the references to secrets alone."""
    return _REFERENCE.sub(lambda found: "\\" + found[0], text)


def is_inside(text: str) -> bool:
    """Whether a secret is part of another interpolation, such as ``${oc.decode:${oc.env:API_KEY}}``."""
    return any(
        text[: found.start()].count("${") > text[: found.start()].count("}") for found in _REFERENCE.finditer(text)
    )


def put_in(text: str, *, key: str) -> str:
    """The text with the secrets of this process's environment.

    Raises:
        ExperimentError: a variable is not set here.
    """

    def value(found: re.Match[str]) -> str:
        name, default = found[1], found[2]
        if name in os.environ or default is not None:
            return os.environ.get(name, default)
        where = f"on {os.uname().nodename}, where the worker runs"
        raise ExperimentError.of(
            key, f"the environment variable {name} is not set {where}; secrets aren't sent there: set it on each node"
        )

    return _REFERENCE.sub(value, text)
