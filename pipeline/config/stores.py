"""Addresses of tracking stores: which of them can be used, and what to write instead of the others."""

import re
from urllib.parse import urlsplit

SQLITE = "sqlite:///"


def problem_of(uri: str) -> str:
    """Say what is wrong with a tracking URI, and what to write; empty if nothing is."""
    scheme = re.split(r"[:+]", uri, maxsplit=1)[0]
    if scheme == "sqlite" and not uri.rpartition(":")[2].strip("/"):
        return f"this names no file; write {SQLITE}mlflow.db"
    if scheme == "sqlite" and not uri.startswith(SQLITE):
        return f"a SQLite file has three slashes before its path, four before an absolute one; write {_mended(uri)}"
    if "://" not in uri or scheme == "file":
        return f"MLflow no longer keeps runs in plain folders; write {SQLITE}mlflow.db or a server's http address"
    if scheme in ("http", "https") and not _is_address(uri):
        return "this is no address; write http://HOST:PORT"
    return ""


def _mended(uri: str) -> str:
    """The URI of the SQLite file that was probably meant."""
    _, _, path = uri.partition(":")
    for separator in ("///", "//"):
        if path.startswith(separator):
            return f"{SQLITE}{path.removeprefix(separator)}"
    return f"{SQLITE}{path}"


def _is_address(uri: str) -> bool:
    try:
        parts = urlsplit(uri)
        return bool(parts.hostname) and parts.port != 0 and uri.isascii() and " " not in uri
    except ValueError:  # brackets or a port that mean nothing
        return False
