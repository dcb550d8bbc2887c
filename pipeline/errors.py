"""Errors that a user can meet, with their exit codes.

A message says what is wrong with the live value, where, and what to do. The command line prints it without a
traceback; any other exception that escapes is a bug of this project and keeps its traceback.
"""

import signal
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

MOST_PROBLEMS = 100  # Limit on the problems that are shown of one file; a file with more is probably not an experiment


class Problem(NamedTuple):
    """Problem in an experiment file."""

    key: str  # Dotted key in the experiment, e.g. "train.epochs"; empty for the file as a whole.
    message: str
    place: str = ""  # Place, "file:line" or the override on the command line; `experiment.load` fills it in

    def __str__(self) -> str:
        return ": ".join(part for part in (self.place, self.key, self.message) if part)


class PipelineError(Exception):
    """Base of all errors that are shown to a user as a message instead of a traceback."""

    exit_code = 1

    @property
    def told(self) -> str:
        """Text that the command line shows, with the notes that were added to the error."""
        return "\n".join([*(f"error: {message}" for message in self.messages), *getattr(self, "__notes__", ())])

    @property
    def messages(self) -> tuple[str, ...]:
        """Messages, each with its place."""
        return (str(self),)

    def _render_traceback_(self) -> list[str]:
        """Show the message in IPython instead of a traceback."""
        return self.told.splitlines()


class ExperimentError(PipelineError):
    """Error in the experiment file: unknown key, wrong value, component that can't be built, unusable data."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.messages))

    @property
    def messages(self) -> tuple[str, ...]:
        """Messages, one for each problem."""
        more = ("... and more problems",) if len(self.problems) > MOST_PROBLEMS else ()
        return (*map(str, self.problems[:MOST_PROBLEMS]), *more)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.problems,)

    @classmethod
    def of(cls, key: str, message: str) -> "ExperimentError":
        """Create an error with a single problem."""
        return cls([Problem(key, message)])


def refusals(check: Callable[[], object]) -> list[Problem]:
    """Return the problems that a check raises as ExperimentError; empty if it raises none."""
    try:
        check()
    except ExperimentError as error:
        return list(error.problems)
    return []


class UsageError(PipelineError):
    """Error in the command line: missing file or package, malformed override, port in use."""

    exit_code = 2


class UnguardedScriptError(UsageError):
    """Call of ``run`` or ``benchmark`` in a script that is imported for its classes."""


class ResourceError(PipelineError):
    """Lack of a resource: cores, GPUs, disk space, a cluster, Optuna, a writable tracking server."""

    exit_code = 3


class TrainingError(PipelineError):
    """Failure of a training that had started: an exception in user code, a NaN, a killed worker.

    ``details`` is the failing rank's traceback, or empty.
    """

    exit_code = 1

    def __init__(self, message: str, details: str = "") -> None:
        self.details = details
        super().__init__(message)

    @property
    def told(self) -> str:
        """Text that the command line shows, after the failed rank's traceback."""
        return "\n".join(filter(None, [self.details.rstrip(), super().told]))

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (str(self), self.details)


class NoMemoryError(TrainingError):
    """Failure of a rank that ran out of memory, on a GPU or on the CPU."""


class Stopped(Exception):
    """Early end of training at the driver's request, on all ranks together and after a checkpoint."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, as an exception that user code can't catch by accident, like Ctrl-C."""


def terminate(*_: object) -> NoReturn:
    """Raise Terminated; a handler of signals."""
    raise Terminated


_interrupts: list[KeyboardInterrupt] = []


def interrupt(number: int, _: object) -> NoReturn:
    """Raise KeyboardInterrupt at SIGINT, Terminated at SIGTERM; a command's handler of signals."""
    _interrupts.append(Terminated() if number == signal.SIGTERM else KeyboardInterrupt())
    raise _interrupts[-1]


def raise_swallowed_interrupt() -> None:
    """Raise the interrupt of a command that went on, since what it was raised in may drop or replace any exception."""
    if _interrupts:
        raise _interrupts[-1]


class Interrupted(PipelineError):
    """End of a run by Ctrl-C; after SIGTERM, the exit code is 143."""

    exit_code = 130

    def __init__(self, message: str, exit_code: int = 130) -> None:
        self.exit_code = exit_code
        super().__init__(message)
