"""URIs of tracking stores and checkpoints: which ones can be used, and how they are shown without credentials."""

import re
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

SQLITE = "sqlite:///"
_SECRET = re.compile(r"pass|pwd|secret|token|key", re.IGNORECASE)
"""Query parameters whose values are secret."""
_URI = re.compile(r"[\w+.-]+://\S+")


def expand_home(path: str) -> str:
    """Expand ``~`` at the start of a path or of the path of a SQLite URI.

    Raises:
        ValueError: the user has no home directory.
    """
    prefix = SQLITE if path.startswith(SQLITE) else ""
    if not (rest := path.removeprefix(prefix)).startswith("~"):
        return path
    try:
        return f"{prefix}{Path(rest).expanduser()}"
    except RuntimeError:
        home = rest.partition("/")[0]
        raise ValueError(f"{home} is not expanded: this user has no home directory. Use an absolute path.") from None


def without_credentials(uri: str) -> str:
    """Return the URI without user name, password and secret query parameters, fit to be shown and stored."""
    try:
        parts = urlsplit(uri)
    except ValueError:  # malformed brackets
        scheme, mark, rest = uri.partition("://")
        return f"{scheme}{mark}{rest.rpartition('@')[2]}"
    if parts.netloc and _SECRET.search(parts.query):  # databases accept credentials there, too
        kept = [(name, value) for name, value in parse_qsl(parts.query) if not _SECRET.search(name)]
        parts = parts._replace(query=urlencode(kept))
    elif "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def without_credentials_in(text: str) -> str:
    """Return a text, such as an argument of a command, with all its URIs as `without_credentials` returns them."""
    return _URI.sub(lambda found: without_credentials(found[0]), text)


def problem_of(uri: str) -> str:
    """Return what is wrong with a tracking URI and what to write instead; empty if it can be used."""
    scheme = re.split(r"[:+]", uri, maxsplit=1)[0]
    if scheme == "sqlite" and not uri.rpartition(":")[2].strip("/"):
        return f"this has no file name. Use {SQLITE}mlflow.db."
    if scheme == "sqlite" and not uri.startswith(SQLITE):
        return f"a SQLite URI has three slashes before a relative path, four before an absolute one. Use {_mended(uri)}"
    if "://" not in uri or scheme == "file":
        return f"MLflow no longer stores runs in plain folders. Use {SQLITE}mlflow.db or a server's http address."
    if scheme in ("http", "https") and not _is_address(uri):
        return "this is not an address. Use http://HOST:PORT."
    return ""


def _mended(uri: str) -> str:
    """Return the SQLite URI that was probably meant."""
    _, _, path = uri.partition(":")
    for separator in ("///", "//"):
        if path.startswith(separator):
            return f"{SQLITE}{path.removeprefix(separator)}"
    return f"{SQLITE}{path}"


def _is_address(uri: str) -> bool:
    try:
        parts = urlsplit(uri)
        return bool(parts.hostname) and parts.port != 0 and uri.isascii() and " " not in uri
    except ValueError:  # malformed brackets or port
        return False
