"""A local Ray that starts in a thread while the driver continues.

Linux ends Ray's processes together with the thread that started them, so one thread holds them until the end.
"""

from threading import Event, Thread
from typing import Self

from pipeline.experiment.schema import Experiment, Parallel
from pipeline.launch._ray.local import LocalRayRequest, started
from pipeline.plan import resources

_begun: list["LocalRay"] = []


class LocalRay:
    """Ray on this machine alone; it starts at once. A context manager that waits until it has started, and ends it.

    Raises:
        ResourceError: on entering: it could not be started.
    """

    def __init__(self, wanted: LocalRayRequest, *, verbose: bool) -> None:
        self._wanted = wanted
        self._verbose = verbose
        self._is_ready, self._is_over = Event(), Event()
        self._error: BaseException | None = None
        self._thread = Thread(target=self._hold, name="local-ray", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        try:
            self._is_ready.wait()
        except BaseException:  # Ctrl-C
            self.end()
            raise
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def is_over(self) -> bool:
        """True once it has been ended."""
        return self._is_over.is_set()

    def end(self) -> None:
        """End it and wait until it has ended."""
        self._is_over.set()
        self._thread.join()

    def _hold(self) -> None:
        try:
            with started(self._wanted, verbose=self._verbose):
                self._is_ready.set()
                self._is_over.wait()
        except BaseException as error:  # noqa: BLE001 - raised in __enter__
            self._error = error
        finally:
            self._is_ready.set()


def begin(experiment: Experiment, *, verbose: bool) -> None:
    """Start the local Ray that an experiment needs, unless it names a cluster."""
    if experiment.parallel.cluster is None:
        _begun.append(LocalRay(_wanted(experiment.parallel), verbose=verbose))


def local_ray(parallel: Parallel, *, verbose: bool) -> LocalRay:
    """Return the local Ray that was started in advance, or a new one. The caller ends it."""
    if _begun and not _begun[-1].is_over:
        return _begun[-1]
    return LocalRay(_wanted(parallel), verbose=verbose)


def end_begun() -> None:
    """End what was started in advance and has not been ended."""
    while _begun:
        _begun.pop().end()


def _wanted(parallel: Parallel) -> LocalRayRequest:
    return LocalRayRequest(workers=min(parallel.workers, resources.detect().cpus))
