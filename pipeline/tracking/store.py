"""MLflow's tracking store by its URI: checks before a run, a SQLite file, links, and what was sent there of a run."""

import os
import sqlite3
import tempfile
import urllib.error
import urllib.request
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from pipeline.errors import ResourceError
from pipeline.experiment.uris import SQLITE, expand_home, problem_of, without_credentials
from pipeline.protocol.events import ArtifactSaved, ModelExported, ModelSaved
from pipeline.record import journal
from pipeline.record.folder import FolderFile
from pipeline.system import hold_lock
from pipeline.tracking import loggers
from pipeline.wording import counted

_HEALTH_TIMEOUT_S = 3
_TRAINING_VIEW = "workflowType=machine_learning"  # without it, MLflow's UI shows the menu for GenAI
_UI_ADDRESS = "http://127.0.0.1:5000"  # of `pipeline ui` by default
_COMPANIONS = ("-journal", "-wal", "-shm")  # of the files beside a SQLite database that is open or was left by a kill
_PATIENCE_S = 60.0  # creating takes two seconds, on a busy machine many times that


def resolve_uri(uri: str, *, base: Path) -> str:
    """Make the path of a SQLite file absolute, which may start with ``~``; return other URIs unchanged."""
    path, mark, query = expand_home(uri).removeprefix(SQLITE).partition("?")
    if not uri.startswith(SQLITE):
        return uri
    return f"{SQLITE}{(base.absolute() / path)}{mark}{query}"


def sqlite_path(uri: str) -> Path | None:
    """Return the file of a SQLite store; None for other stores."""
    return Path(uri.removeprefix(SQLITE).partition("?")[0]) if uri.startswith(SQLITE) else None


def artifact_root(uri: str) -> str | None:
    """Return the artifact location of new experiments: beside a SQLite file; None if the server decides."""
    path = sqlite_path(uri)
    return (path.parent / "mlartifacts").absolute().as_uri() if path else None


def is_server(uri: str) -> bool:
    """Return True if the store is a server, reached over HTTP."""
    return uri.startswith(("http://", "https://"))


def with_credentials(uri: str) -> str:
    """Return a store's URI with the credentials of MLFLOW_TRACKING_URI, if that names the same store."""
    current = os.environ.get("MLFLOW_TRACKING_URI", "")
    return current if without_credentials(current) == uri else uri


def check_store(uri: str) -> str | None:
    """Check before training that the store can keep results; return a warning if a server doesn't answer now."""
    shown = without_credentials(uri)
    if problem := problem_of(uri):
        raise ResourceError(f"tracking.uri: is {shown}; {problem}")
    if path := sqlite_path(uri):
        try:
            _check_file(path)
        except OSError as error:
            raise ResourceError(f"tracking.uri: {path} can't be used ({error.strerror}). Name another file.") from error
    if not is_server(uri):
        return None
    try:
        with urllib.request.urlopen(f"{shown.rstrip('/')}/health", timeout=_HEALTH_TIMEOUT_S):  # noqa: S310 - the scheme is http(s)
            return None
    except urllib.error.HTTPError:
        return None  # it answers; a proxy may ask for credentials that only MLflow sends
    except OSError as error:
        return (
            f"{shown} doesn't answer ({getattr(error, 'reason', error)}). "
            "Training continues, and results wait in the run's folder until it does"
        )


def _check_file(path: Path) -> None:
    """Check that MLflow can keep runs in a SQLite file, which needn't exist yet."""
    folder = path.parent
    if not folder.is_dir():
        raise ResourceError(
            f"tracking.uri: the folder {folder} of {path.name} doesn't exist. Create it: mkdir -p {folder}"
        )
    try:  # os.access isn't enough: root has permission even on a read-only file system
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ResourceError(
            f"tracking.uri: can't write to {folder}, the folder of {path.name} ({error.strerror}). "
            "Change its permissions, or set tracking.uri to a file elsewhere."
        ) from error
    if path.is_dir():
        raise ResourceError(f"tracking.uri: {path} is a folder. Name a file in it: sqlite:///{path}/mlflow.db")
    if not path.exists():
        return
    wrong = "" if os.access(path, os.W_OK) else "no permission to write"
    try:
        # Not read-only: SQLite rolls back what a killed process has left half-written.
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True)) as database:
            database.execute("SELECT name FROM sqlite_master")
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:  # busy: another process is writing
            wrong = wrong or str(error)
    if wrong:
        raise ResourceError(
            f"tracking.uri: {path} can't be used ({wrong}). Change its permissions, "
            "or move it away: the next run creates a new file."
        )


def create_store(uri: str) -> None:
    """Create a SQLite store unless it exists: under another name, then renamed, so that a kill leaves no half of it."""
    if (path := sqlite_path(uri)) is None:
        return
    place = path.resolve()  # a symbolic link is kept
    if _has_content(place):
        return
    draft = place.with_name(f"{place.name}.partial")
    with hold_lock(place.with_name(f"{place.name}.lock"), patience_s=_PATIENCE_S):
        if not _has_content(place):
            for suffix in ("", *_COMPANIONS):  # left by a creation that was killed
                draft.with_name(f"{draft.name}{suffix}").unlink(missing_ok=True)
            _write_empty_store(draft, artifacts=artifact_root(uri) or "")
        place.touch()  # NFS may remember that there was no such file; this asks the file server
        if _has_content(place):
            draft.unlink(missing_ok=True)
        else:
            for suffix in _COMPANIONS:  # left by a store that was moved away: SQLite would read them as the new one's
                place.with_name(f"{place.name}{suffix}").unlink(missing_ok=True)
            draft.replace(place)


def _write_empty_store(path: Path, *, artifacts: str) -> None:
    """Have MLflow create a store in a single file."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    SqlAlchemyStore(f"{SQLITE}{path}", artifacts).engine.dispose()
    with closing(sqlite3.connect(path)) as database:  # the last connection leaves no other file
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def run_link(uri: str, experiment_id: str, run_id: str) -> str:
    """Return the link to a run in MLflow's UI, after the command that serves the UI of a store without a server."""
    page = run_page(ui_address(uri), experiment_id, run_id)
    return page if is_server(uri) else f"pipeline ui, then {page}"


def run_page(address: str, experiment_id: str, run_id: str) -> str:
    """Return the address of a run's page; of an empty ``address`` it is relative to any page of MLflow's UI."""
    return f"{address}{'/' if address else ''}#/experiments/{experiment_id}/runs/{run_id}?{_TRAINING_VIEW}"


def runs_link(address: str, experiment_id: str) -> str:
    """Return the link to the table of runs; without ``/runs`` MLflow opens its page for GenAI."""
    return f"{address}/#/experiments/{experiment_id}/runs?{_TRAINING_VIEW}"


def ui_address(uri: str) -> str:
    """Return the address of the UI: the server's, or the default of ``pipeline ui``."""
    return without_credentials(uri).rstrip("/") if is_server(uri) else _UI_ADDRESS


LINK_LABEL = "mlflow   "  # Start of the line with the address of a run, see `link_of`
Upload = Annotated[ArtifactSaved | ModelSaved, Field(discriminator="kind")]


class TrackingOutcome(FolderFile):
    """State of the delivery of a run to MLflow. It is written after each call, so that a kill repeats one call."""

    file_name: ClassVar[str] = "sync.json"
    offset: int = 0  # Bytes of the journal that MLflow has accepted or refused
    is_closed: bool = False  # True if the last of them was the end of the run
    experiment_id: str = ""  # MLflow's id of the experiment; empty if MLflow never answered
    run_id: str = ""  # MLflow's id of the main run; empty if MLflow never answered
    delivered: bool = False  # True if MLflow has everything that it accepts, and the run has ended
    uri: str = ""  # URI of the store, without credentials, if it isn't the run's own
    message: str = ""  # Missing results and the command that sends them; after a sync, the link to the run; else empty
    trouble: str = ""  # Reason of the current outage; empty if there is none
    children: dict[str, str] = {}  # MLflow's ids of the measurements by trial
    errors: dict[str, str] = {}  # First error of each trial of this session
    uploads: list[Upload] = []  # Files to upload; metrics don't wait for them
    models: list[ModelSaved] = []  # Models, uploaded at the end: a measurement may follow
    exported: ModelExported | None = None  # Folder of the last model as MLflow keeps it
    logs_model: bool = True
    is_trial: bool = False
    has_finished: bool = False
    refused: int = 0  # Number of events that MLflow has refused for good
    missing: list[str] = []  # Files that are not sent, after a warning

    def waiting(self, folder: Path) -> str:
        """Describe what MLflow lacks, e.g. "12 events and 3 files"; empty if nothing."""
        events = 0
        with suppress(OSError), (folder / journal.FILE_NAME).open("rb") as file:
            file.seek(self.offset)
            events = sum(1 for _ in file)
        counts = {"event": events, "file": len(self.uploads)}
        return " and ".join(counted(count, noun, spec=",") for noun, count in counts.items() if count)

    def fail(self, folder: Path, *, trouble: str = "the driver was killed", what: str = "some results") -> None:
        """Note that ``what`` is missing, and why: by default what is true if the driver is killed from now on."""
        self.delivered = False
        self.message = (
            f"not in MLflow yet: {what} ({trouble}). Nothing is lost. "
            f"Send the rest with: pipeline sync {folder}{f' --to {self.uri}' if self.uri else ''}"
        )


def link_of(uri: str, outcome: TrackingOutcome) -> str:
    """Return the line with the address of a run in the UI of its tracking store."""
    return f"{LINK_LABEL}{run_link(uri, outcome.experiment_id, outcome.run_id)}"


def places_of(folder: Path, *, is_running: bool = False) -> str:
    """Return the places of a run's results, a line each; a run that is running still sends them."""
    opened, outcome = journal.opened(folder / journal.FILE_NAME), TrackingOutcome.read(folder)
    lines = [f"run      {folder}"]
    if (folder / "report.html").exists():
        lines.append(f"report   {folder / 'report.html'}")
    if outcome and outcome.run_id:
        uri = outcome.uri or (opened.tracking_uri if opened else "")
        lines.append(link_of(uri, outcome))
        lines.append(f"all runs {runs_link(ui_address(uri), outcome.experiment_id)}")
    lines += loggers.places(folder)
    if outcome and not outcome.delivered and not is_running:
        lines.append(outcome.message)
    return "\n".join(lines)
