"""``pipeline sync``: delivery of a run that has ended, from its journal."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event as Flag

from pipeline.config.uris import without_credentials
from pipeline.errors import ResourceError, UsageError
from pipeline.protocol.events import AnyEvent, ModelSaved, RunClosed, RunOpened, Tagged
from pipeline.protocol.progress import ProgressReporter
from pipeline.recording import journal
from pipeline.recording.delivery import Delivery, batches, persist, quiet
from pipeline.recording.folder import is_kept, killed, trials_of
from pipeline.recording.outcome import TrackingOutcome
from pipeline.recording.store import check_store, run_link, with_credentials
from pipeline.recording.trackers import attach_also
from pipeline.wording import join_names


def sync(folder: Path, *, warn: Callable[[str], None], to: str = "") -> TrackingOutcome:
    """Send the journal of a finished or killed run to its tracking store and its other trackers; idempotent.

    If the journal lacks the end of the run, its MLflow runs end as KILLED at the time of its last event.

    Args:
        folder: the run's folder.
        warn: called when an outage begins and when it ends.
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
    """Send the ``wanted`` events, or all of them, and those to the other trackers, too."""
    path = folder / journal.FILE_NAME
    opened, last, count = None, None, 0
    for event in journal.read(path):  # and again below: one event in memory at a time
        opened, last, count = (event if isinstance(event, RunOpened) else opened), event, count + 1
    if journal.is_open(path):
        raise UsageError(
            f"{folder}: this run is still running in {journal.describe_writer(path)} and sends its results itself. "
            "Sync it after it has ended."
        )
    if opened is None or last is None:
        raise UsageError(f"{path}: nothing to send, because the run ended before it started")
    if not is_kept(folder):
        raise UsageError(f"{folder}: nothing to send, because the run ended before its first step")
    uri = to or with_credentials(opened.tracking_uri)
    try:
        check_store(uri)  # a server that doesn't answer now is tried anyway
    except ResourceError as error:
        raise ResourceError(f"{error}\nOr send it to another store: pipeline sync {folder} --to URI") from error
    also = (
        () if to or wanted else attach_also(opened.also, folder, known=count - 1, warn=warn)
    )  # an earlier end is skipped
    delivery = Delivery(folder=folder, warn=warn, uri=uri)
    end = journal.ending(path) or killed(at=last.time)
    _deliver(delivery, filter(wanted, _ended_once(path, end=end)), count=count)
    elsewhere = "" if uri == with_credentials(opened.tracking_uri) else without_credentials(uri)
    outcome = TrackingOutcome.of(delivery, trouble=delivery.trouble, waiting=count, uri=elsewhere)
    known = TrackingOutcome.kept(folder)
    if not (elsewhere and known and known.delivered):  # links stay on the run's own store
        with suppress(OSError):  # the folder may be read-only
            outcome.keep(folder)
    for tracker in also:
        tracker.close(timeout_s=None)
    if not outcome.message:
        link = run_link(uri, outcome.experiment_id, outcome.run_id)
        missing = delivery.run.missing
        what = f"all of {folder} except {join_names(missing)}" if missing else f"all of {folder}"
        outcome = outcome.model_copy(update={"message": f"{what} is in MLflow: {link}"})
    if any(tracker.has_failed for tracker in also):  # of which the user has been told
        outcome = outcome.model_copy(update={"delivered": False})
    return outcome


def _deliver(delivery: Delivery, events: Iterable[AnyEvent], *, count: int) -> None:
    ending = Flag()
    ending.set()
    with quiet():
        with ProgressReporter("sending results", total=count, unit="events") as progress:
            for batch in batches(events):
                if not persist(partial(delivery.attempt, batch), ending=ending):
                    return
                progress.by(len(batch))
        persist(delivery.upload, ending=ending)


def _ended_once(path: Path, *, end: RunClosed) -> Iterator[AnyEvent]:
    """Yield the events of a run with a single end: a run may be resumed."""
    yield from (event for event in journal.read(path) if not isinstance(event, RunClosed))
    yield end
