"""``pipeline sync``: delivery of a run that has ended, from its journal."""

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

from pipeline.errors import ResourceError, UsageError
from pipeline.experiment.uris import without_credentials
from pipeline.protocol.events import AnyEvent, ModelSaved, RunClosed, RunOpened, Tagged
from pipeline.record import journal
from pipeline.record.folder import is_kept, killed, trials_of
from pipeline.tracking.mlflow.outcome import TrackingOutcome
from pipeline.tracking.mlflow.sender import Sender
from pipeline.tracking.mlflow.store import check_store, run_link, with_credentials
from pipeline.wording import join_names


def sync(folder: Path, *, warn: Callable[[str], None], to: str = "") -> TrackingOutcome:
    """Send the journal of a finished or killed run to its tracking store and its other trackers; idempotent.

    If the journal lacks the end of the run, its MLflow runs end as KILLED at the time of its last event.

    Args:
        folder: the run's folder.
        warn: called when an outage starts and when it ends.
        to: URI of another store as `resolve_uri` returns it, with credentials; empty for the run's own, and its other
            trackers.

    Raises:
        UsageError: the journal is missing or damaged, or the run is still running and sends its events itself.
        ResourceError: the store can never keep results.
    """
    return _send(folder, warn=warn, to=to)


def sync_with_trials(folder: Path, *, warn: Callable[[str], None], to: str = "") -> Iterator[TrackingOutcome]:
    """Send a run and, if it is a sweep, its trials; stop at the first incomplete delivery. See `sync`.

    A trial's MLflow run needs its sweep's as parent, and the sweep's tags about trials need the trials' runs.
    """
    trials = [trial for trial in trials_of(folder) if journal.opened(trial / journal.FILE_NAME)]
    if trials:

        def is_own(event: AnyEvent) -> bool:
            return not (isinstance(event, Tagged) or (isinstance(event, ModelSaved) and event.run))

        begun = _send(folder, warn=warn, to=to, wanted=is_own)
        if not begun.delivered:
            yield begun
            return
    for each in (*trials, folder):
        outcome = sync(each, warn=warn, to=to)
        yield outcome
        if not outcome.delivered:
            return


def _send(
    folder: Path, *, warn: Callable[[str], None], to: str, wanted: Callable[[AnyEvent], bool] | None = None
) -> TrackingOutcome:
    """Send the ``wanted`` events; or all events, also to the named loggers."""
    opened, end = _find_ends(folder)
    own = with_credentials(opened.tracking_uri)
    uri = to or own
    try:
        check_store(uri)  # a server that doesn't answer now is tried anyway
    except ResourceError as error:
        raise ResourceError(f"{error}\nOr send it to another store: pipeline sync {folder} --to URI") from error
    sender = Sender(
        folder,
        uri=uri,
        other_uri="" if uri == own else without_credentials(uri),
        warn=warn,
        loggers=() if to or wanted else opened.also,
        wanted=wanted or (lambda _: True),
    )
    with closing(sender):
        sender.end(end)
        sender.send()
        outcome = sender.outcome
    known = TrackingOutcome.kept(folder)
    if not (outcome.uri and known and known.delivered):  # links stay on the run's own store
        with suppress(OSError):  # the folder may be read-only
            outcome.keep(folder)
    if not outcome.message:
        link = run_link(uri, outcome.experiment_id, outcome.run_id)
        what = f"all of {folder}{f' except {join_names(sender.missing)}' if sender.missing else ''}"
        outcome = outcome.model_copy(update={"message": f"{what} is in MLflow: {link}"})
    if sender.has_failed_logger:  # a warning has named it
        outcome = outcome.model_copy(update={"delivered": False})
    return outcome


def _find_ends(folder: Path) -> tuple[RunOpened, RunClosed]:
    """Return the events that opened and ended a run; a killed run ended at its last event.

    Raises:
        UsageError: the journal is missing or damaged, or there is nothing to send yet.
    """
    path = folder / journal.FILE_NAME
    opened, last = None, None
    for event in journal.read(path):  # one event in memory at a time
        opened, last = (event if isinstance(event, RunOpened) else opened), event
    if journal.is_open(path):
        raise UsageError(
            f"{folder}: this run is still running in {journal.describe_writer(path)} and sends its results itself. "
            "Sync it after it has ended."
        )
    if opened is None or last is None:
        raise UsageError(f"{path}: nothing to send, because the run ended before it started")
    if not is_kept(folder):
        raise UsageError(f"{folder}: nothing to send, because the run ended before its first step")
    return opened, journal.ending(path) or killed(at=last.time)
