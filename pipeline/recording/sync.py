"""``pipeline sync``: what MLflow lacks of a run that has ended, from its journal."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event as Flag

from pipeline.advance import Advance
from pipeline.errors import UsageError
from pipeline.events import AnyEvent, RunClosed, RunOpened
from pipeline.recording import journal
from pipeline.recording.attempts import batches, persist
from pipeline.recording.delivery import Delivery, quiet
from pipeline.recording.outcome import TrackingOutcome
from pipeline.recording.store import check_store, run_link, with_credentials


def sync(folder: Path, *, warn: Callable[[str], None]) -> TrackingOutcome:
    """Send a finished or crashed run's journal to its tracking store. What is there already isn't added again.

    A journal that nobody closed is that of a killed driver: its MLflow runs end as KILLED, at the time of its last
    event.

    Raises:
        UsageError: no journal, a damaged one, or its run is still going on and sends its events itself.
        ResourceError: no results can ever be written to that store.
    """
    path = folder / journal.FILE_NAME
    opened, last, count = None, None, 0
    for event in journal.read(path):  # a second time below: a long run's events needn't be in memory all at once
        opened, last, count = (event if isinstance(event, RunOpened) else opened), event, count + 1
    if journal.is_open(path):
        raise UsageError(
            f"{folder}: this run is still going on and sends its results itself; sync it when it has ended"
        )
    if opened is None or last is None:
        raise UsageError(f"{path}: nothing to send, the run ended before it began")
    uri = with_credentials(opened.tracking_uri)
    check_store(uri)  # a server that doesn't answer is told of below
    delivery = Delivery(folder=folder, warn=warn, uri=uri)
    ending = Flag()
    ending.set()
    with quiet():
        with Advance("sending results", total=count, unit="events") as advance:
            for batch in batches(_ended_once(path, last=last)):
                if not (sent := persist(partial(delivery.attempt, batch), ending=ending)):
                    break
                advance.by(len(batch))
        if sent:
            persist(delivery.upload, ending=ending)
    outcome = TrackingOutcome.of(delivery, folder=folder, trouble=delivery.trouble, waiting=count)
    with suppress(OSError):  # a folder that can only be read is no reason to fail
        outcome.keep(folder)
    if outcome.message:
        return outcome
    link = run_link(uri, outcome.experiment_id, outcome.run_id)
    return outcome.model_copy(update={"message": f"all of {folder} is in MLflow: {link}"})


def _ended_once(path: Path, *, last: AnyEvent) -> Iterator[AnyEvent]:
    """The events of a run that may have been continued, or killed; ``last`` is the last one."""
    yield from (event for event in journal.read(path) if not isinstance(event, RunClosed))
    if isinstance(last, RunClosed):
        yield last
    else:
        yield RunClosed(time=last.time, status="KILLED", message="The driver was killed before it could end the run.")
