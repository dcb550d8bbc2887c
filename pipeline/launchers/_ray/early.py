"""A local Ray that starts while the driver does something else.

Linux ends Ray's processes together with the thread that has started them. So one thread has them all the time.
"""

from threading import Event, Thread
from typing import Self

from pipeline import resources
from pipeline.config.parallel import Parallel
from pipeline.config.schema import Experiment
from pipeline.launchers._ray.cluster import cluster_address
from pipeline.launchers._ray.local import Wanted, started

_begun: list["LocalRay"] = []


class LocalRay:
    """Ray on this machine alone. It begins to start at once; a context manager that waits for it, and ends it.

    Raises:
        ResourceError: from ``with``: it could not be started.
    """

    def __init__(self, wanted: Wanted, *, verbose: bool) -> None:
        self._wanted = wanted
        self._verbose = verbose
        self._is_ready, self._is_over = Event(), Event()
        self._error: BaseException | None = None
        self._thread = Thread(target=self._hold, name="local-ray", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        self._is_ready.wait()
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _hold(self) -> None:
        try:
            with started(self._wanted, verbose=self._verbose):
                self._is_ready.set()
                self._is_over.wait()
        except BaseException as error:  # noqa: BLE001 - raised where somebody waits for it
            self._error = error
        finally:
            self._is_ready.set()


def begin(experiment: Experiment, *, verbose: bool) -> None:
    """Begin to start what an experiment needs, if it is a Ray of this machine's own."""
    if cluster_address(experiment.parallel) is None:
        _begun.append(LocalRay(_wanted(experiment.parallel, streams=experiment.is_streamed), verbose=verbose))


def local_ray(parallel: Parallel, *, streams: bool, verbose: bool) -> LocalRay:
    """What was begun, if anything was. The caller ends it."""
    return _begun.pop() if _begun else LocalRay(_wanted(parallel, streams=streams), verbose=verbose)


def _wanted(parallel: Parallel, *, streams: bool) -> Wanted:
    return Wanted(workers=min(parallel.workers, resources.detect().cpus), streams=streams)


def end_unused() -> None:
    """End what nobody has asked for."""
    while _begun:
        _begun.pop().__exit__()
