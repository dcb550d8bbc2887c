"""Being connected to a Ray, and what this project sets for all of them."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import ray
from ray.exceptions import AuthenticationError, RpcError

from pipeline.errors import ResourceError
from pipeline.system.process import environment
from pipeline.system.signals import own_signals

_SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # the end of a trial waits for this poll
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",  # the controller is this process, see trainer.py
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # would print twice what user code prints
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # workers stay where relative paths of the experiment mean something
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # 15 by itself, which would make Ray's workers slower than torchrun's on a busy machine
    "RAY_enable_worker_prestart": "0",  # would start processes that nobody asked for
}


@contextmanager
def connection(
    init: Callable[..., None],
    *,
    refusal: Callable[[Exception], str],
    verbose: bool,
    settings: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Be connected to a Ray.

    Args:
        init: connects; called with those arguments of ray.init that are about its output.
        refusal: words the error if that doesn't succeed.
        verbose: whether to let Ray's output through.
        settings: environment variables beside those of all connections.

    Raises:
        ResourceError: it can't be connected.
    """
    level = logging.INFO if verbose else logging.ERROR
    logging.getLogger("ray").setLevel(level)
    logging.getLogger("ray.train").setLevel(logging.INFO if verbose else logging.CRITICAL)  # errors are raised, too
    # Ray turns its token authentication on and redirects breakpoint(), both by setting variables in this process.
    variables = {**_SETTINGS, **(settings or {}), "RAY_AUTH_MODE": None, "PYTHONBREAKPOINT": None}
    with environment(**variables), own_signals():
        try:
            with own_signals():  # else Ray would answer SIGTERM for the rest of the run
                init(log_to_driver=verbose, logging_level=level, configure_logging=verbose)
        except (OSError, ValueError, RuntimeError, AuthenticationError, RpcError) as error:
            raise ResourceError(refusal(error)) from error
        try:
            yield
        finally:
            ray.shutdown()


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
