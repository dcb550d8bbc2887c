"""Connection to Ray, local or a cluster, with this project's settings for both."""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import ray
from ray.exceptions import AuthenticationError, RpcError

from pipeline.errors import ResourceError
from pipeline.system.process import environment
from pipeline.system.signals import own_signals

_SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # polling interval that the end of a trial waits for
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",  # the controller may be this process
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # would print twice what user code prints
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # workers stay in the folder that the experiment's relative paths refer to
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # default of later releases, of which Ray 2.54 warns on stderr
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's default of 15 would make its workers slower than torchrun's on a busy machine
    "RAY_enable_worker_prestart": "0",  # would start processes that are not needed
}


@contextmanager
def connection(
    init: Callable[..., None],
    *,
    refusal: Callable[[Exception], str],
    verbose: bool,
    settings: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Connect to Ray for the duration of the context.

    Args:
        init: connects; called with the logging arguments of ray.init.
        refusal: makes the error message if connecting fails.
        verbose: show Ray's output.
        settings: further environment variables.

    Raises:
        ResourceError: connecting fails.
    """
    level = logging.INFO if verbose else logging.ERROR
    logging.getLogger("ray").setLevel(level)
    for name in ("ray.train", "ray.tune"):  # errors are raised as exceptions, or passed to callbacks, too
        logging.getLogger(name).setLevel(logging.INFO if verbose else logging.CRITICAL)
    # Ray turns its token authentication on and redirects breakpoint(), both by setting variables in this process.
    kept = {name: os.environ.get(name) for name in ("RAY_AUTH_MODE", "PYTHONBREAKPOINT")}
    with environment(**{**_SETTINGS, **(settings or {}), **kept}), own_signals():
        try:
            with own_signals():  # otherwise Ray would handle SIGTERM for the rest of the run
                init(log_to_driver=verbose, logging_level=level, configure_logging=verbose)
        except (OSError, ValueError, RuntimeError, AuthenticationError, RpcError) as error:
            raise ResourceError(refusal(error)) from error
        try:
            yield
        finally:
            ray.shutdown()


def outside_main_thread(
    call: Callable[[], object], *, name: str, interrupt: Callable[[], object], patience_s: float
) -> BaseException | None:
    """Call a function of Ray in a thread and return its error.

    In the main thread Ray would replace the handler of Ctrl-C and end this process.

    Args:
        call: the function.
        name: name of the thread.
        interrupt: called at Ctrl-C, before it is raised.
        patience_s: seconds that the thread then has to end.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - it is raised again in the main thread
            errors.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.2)  # a signal is handled between two of these
    except BaseException:
        interrupt()
        thread.join(patience_s)
        raise
    return errors[0] if errors else None
