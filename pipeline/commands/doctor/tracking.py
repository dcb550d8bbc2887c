"""Check of the MLflow tracking store: reachable, access granted, compatible version."""

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pipeline.commands.doctor.check_result import CheckResult
from pipeline.errors import ResourceError
from pipeline.experiment.uris import default_address, without_credentials, without_credentials_in
from pipeline.tracking.store import check_store, is_server, resolve_uri, with_credentials

if TYPE_CHECKING:
    import requests

_SUBJECT = "MLflow"
_TIMEOUT_S = 5
_LOG_IN = "export MLFLOW_TRACKING_USERNAME=NAME MLFLOW_TRACKING_PASSWORD=PASSWORD"
_REFUSALS = {
    401: ("requires a valid login", _LOG_IN),
    403: ("denies access to experiments", _LOG_IN),
    404: ("is not an MLflow server", "set tracking.uri to the address that shows the MLflow UI"),
}
_WRONG_NAME = "Invalid Host"


def store(uri: str | None) -> str:
    """Return the address of the store: ``uri``, MLFLOW_TRACKING_URI, or a SQLite file in the working directory."""
    return resolve_uri(uri or default_address(), base=Path.cwd())


def check_tracking(uri: str, *, client: str | None) -> CheckResult:
    """Check that the store accepts results.

    Args:
        uri: address of the store; may contain credentials.
        client: version of the installed MLflow client, or None.
    """
    shown = without_credentials(uri)
    try:
        warning = check_store(uri)
    except ResourceError as error:
        what, _, fix = without_credentials_in(str(error)).removesuffix(".").rpartition(". ")
        return CheckResult(subject=_SUBJECT, status="problem", what=what, fix=fix)
    if warning is not None:
        fix = f"from here, curl {shown.rstrip('/')}/health; to start the server, mlflow server --host ... --port ..."
        return CheckResult(subject=_SUBJECT, status="warning", what=without_credentials_in(warning), fix=fix)
    if not is_server(uri):
        return CheckResult(subject=_SUBJECT, status="ok", what=f"{shown} can be written")
    return _server(with_credentials(uri), shown=shown, client=client)


def _server(uri: str, *, shown: str, client: str | None) -> CheckResult:
    try:
        answer = _ask(uri, "/api/2.0/mlflow/experiments/search?max_results=1")
        version = _ask(uri, "/version")
    except ResourceError as error:
        return CheckResult(subject=_SUBJECT, status="warning", what=f"{shown} {error}", fix="check the server's log")
    if answer.status_code in _REFUSALS:
        what, fix = _REFUSALS[answer.status_code]
        if _WRONG_NAME in answer.text:
            host = urlsplit(shown).netloc
            what, fix = f"rejects the host name {host}", f"mlflow server --allowed-hosts {host} ..., on the server"
        said = " ".join(answer.text.split())[:100]
        return CheckResult(
            subject=_SUBJECT, status="problem", what=f"{shown} {what} ({answer.status_code}: {said})", fix=fix
        )
    if answer.status_code != 200:
        return CheckResult(
            subject=_SUBJECT,
            status="warning",
            what=f"{shown} answers with status {answer.status_code}. Results wait in the runs' folders meanwhile",
            fix="check the server's log",
        )
    return _versions(version.text.strip() if version.status_code == 200 else "", shown=shown, client=client)


def _versions(server: str, *, shown: str, client: str | None) -> CheckResult:
    if not server or client is None:
        return CheckResult(subject=_SUBJECT, status="ok", what=f"{shown} accepts results. Its version is unknown")
    what = f"{shown} accepts results. The server is MLflow {server}, the client here {client}"
    if _release(server) < _release(client):  # different patch versions are compatible
        fix = f"on the server: pip install mlflow=={client}; mlflow db upgrade DATABASE"
        return CheckResult(
            subject=_SUBJECT, status="warning", what=f"{what}. The client may need a newer server", fix=fix
        )
    return CheckResult(subject=_SUBJECT, status="ok", what=what)


def _release(version: str) -> tuple[int, ...]:
    """Return major and minor of a version."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


def _ask(uri: str, path: str) -> "requests.Response":
    """Send a GET request with MLflow's own client and credentials.

    Raises:
        ResourceError: there was no response.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    try:
        answer: requests.Response = http_request(
            get_default_host_creds(uri), path, "GET", max_retries=0, timeout=_TIMEOUT_S, raise_on_status=False
        )
    except (MlflowException, OSError) as error:
        raise ResourceError(f"doesn't answer ({without_credentials_in(str(error)).splitlines()[0]})") from None
    return answer
