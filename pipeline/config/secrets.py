"""Addresses without the user names and passwords in them."""

import re
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

SECRET = re.compile(r"pass|pwd|secret|token|key", re.IGNORECASE)
"""Names of a query's parameters whose values are nobody else's business."""


def without_credentials(uri: str) -> str:
    """The URI as it may be shown and written down: user name and password removed."""
    parts = urlsplit(uri)
    if parts.netloc and SECRET.search(parts.query):  # databases take them there, too
        kept = [(name, value) for name, value in parse_qsl(parts.query) if not SECRET.search(name)]
        parts = parts._replace(query=urlencode(kept))
    elif "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
