"""URIs of tracking stores and checkpoints: which ones can be used, and how they are shown without credentials."""

import os
import re
from pathlib import Path
from urllib.parse import unquote_plus, urlsplit

SQLITE = "sqlite:///"
_SCHEMES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql", "databricks")
TRACKING_VARIABLE = "MLFLOW_TRACKING_URI"
"""Variable with the address of the tracking store of experiments that don't set ``tracking.uri``."""
_SECRET = re.compile(r"pass|pwd|secret|token|key|odbc_connect", re.IGNORECASE)
"""Query parameters whose values are secret; that of odbc_connect is a list of parameters."""
_DATABASE = r"(?:postgres|mysql|mssql)[\w+]*://"
_HOST_AND_PORT = r"(?:\[[^\]/@]*\]|[^:/?#@\[]*)(?::\d*)?"
_CREDENTIALS = re.compile(
    rf"({_DATABASE}|://(?!{_HOST_AND_PORT}/))[^:/]*(?::[^@]*)?@(?:.*@)?", re.IGNORECASE | re.DOTALL
)
"""User name and password, as SQLAlchemy's ``make_url`` reads them: after a colon, the first slash doesn't end them.
Except in a database's URI, ``HOST:PORT/`` is what it looks like, so that a path may contain an @."""
_CLOSING = ")]}>'\"`,.;:"  # Characters that belong to the text around a URI
_URI = re.compile(rf"(?<![\w+.-])[\w+.-]+://(?:[^\s:/\[]*:(?!\d+[{re.escape(_CLOSING)}]*(?:[/\s]|$))\S[^@\n]*@)?\S*")
"""A URI in a text. Its password may contain spaces, unless it looks like a port."""


def default_address() -> str:
    """Return the address of the tracking store for an experiment without ``tracking.uri``."""
    return os.environ.get(TRACKING_VARIABLE) or f"{SQLITE}mlflow.db"


def describe_origin(uri: str, *, is_set: bool) -> str:
    """Describe where an address comes from; ``is_set`` is True if ``tracking.uri`` has a value."""
    if uri == os.environ.get(TRACKING_VARIABLE):
        return TRACKING_VARIABLE
    return "tracking.uri" if is_set else "default"


def expand_home(path: str) -> str:
    """Expand ``~`` at the start of a path or of the path of a SQLite URI."""
    prefix = SQLITE if path.startswith(SQLITE) else ""
    if not (rest := path.removeprefix(prefix)).startswith("~"):
        return path
    try:
        return f"{prefix}{Path(rest).expanduser()}"
    except RuntimeError:
        home = rest.partition("/")[0]
        raise ValueError(f"{home} is not expanded: this user has no home directory. Use an absolute path.") from None


def without_credentials(uri: str) -> str:
    """Return the URI without user name, password and secret query parameters, fit to be shown and stored.

    A password may contain any character. Where that is ambiguous, all before the last @ is removed.
    """
    if "://" not in uri:
        return uri
    address, mark, query = _CREDENTIALS.sub(r"\1", uri).partition("?")
    parameters = query.split("&")
    kept = [each for each in parameters if not _SECRET.search(unquote_plus(each.rpartition("=")[0]))]
    return f"{address}{mark}{'&'.join(kept)}" if kept else address


def has_password(uri: str) -> bool:
    """Return True if the URI contains a password before its host."""
    found = _CREDENTIALS.search(uri)
    return found is not None and ":" in found[0].partition("://")[2]


def without_credentials_in(text: str) -> str:
    """Return a text, such as the message of an error, with all its URIs as `without_credentials` returns them."""

    def replace(found: re.Match[str]) -> str:
        uri = found[0].rstrip(_CLOSING)
        return f"{without_credentials(uri)}{found[0][len(uri) :]}"

    return _URI.sub(replace, text)


def problem_of(uri: str) -> str:
    """Return the problem of a tracking URI and the form to write instead; empty if it can be used."""
    scheme = re.split(r"[:+]", uri, maxsplit=1)[0]
    if scheme == "sqlite" and not uri.rpartition(":")[2].strip("/"):
        return f"this has no file name. Use {SQLITE}mlflow.db."
    if scheme == "sqlite" and not uri.startswith(SQLITE):
        path = uri.partition(":")[2]
        mended = f"{SQLITE}{path.removeprefix('///' if path.startswith('///') else '//')}"
        return f"a SQLite URI has three slashes before a relative path, four before an absolute one. Use {mended}"
    if "://" not in uri or scheme == "file":
        return f"MLflow no longer stores runs in plain folders. Use {SQLITE}mlflow.db or a server's http address."
    if scheme not in _SCHEMES:
        return f"MLflow has no store for {scheme} addresses. Use {SQLITE}mlflow.db or http://HOST:PORT."
    try:
        parts = urlsplit(uri)
        is_address = bool(parts.hostname) and parts.port != 0 and uri.isascii() and " " not in uri
    except ValueError:  # malformed brackets or port
        is_address = False
    if scheme in ("http", "https") and not is_address:
        return "this is not an address. Use http://HOST:PORT."
    return ""
