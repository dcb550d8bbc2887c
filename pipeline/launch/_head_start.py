"""Processes of a launcher, started while the experiment is still being checked, which takes as long.

A command calls `given` as soon as it has read the file, before it imports torch; the launcher takes the processes over.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from pipeline.experiment import components
from pipeline.experiment.schema import Experiment
from pipeline.experiment.targets import BUILT_IN
from pipeline.launch._forks import WITHOUT_THREADS, Forks
from pipeline.plan.outer_launcher import is_follower
from pipeline.system.process import environment

_HASHES = "PYTHONHASHSEED"
_LOADED = {"torch", "pipeline", "ray"}
_begun: list[Forks] = []


@contextmanager
def given(experiment: Experiment, *, verbose: bool = False) -> Iterator[None]:
    """Start the processes that the experiment's launcher will need; end those that it hasn't taken over.

    The processes have Python's hashes from the experiment's seed: otherwise each of them, and each run, would iterate
    over a set of texts in another order.

    Args:
        experiment: the experiment that will run.
        verbose: pass the output of the launcher and the workers on to the terminal.
    """
    with ExitStack() as stack:
        hashes = {_HASHES: os.environ.get(_HASHES, str(experiment.seed % 2**32))}
        if experiment.parallel.launcher == "torchrun" and is_follower():
            stack.enter_context(environment(**WITHOUT_THREADS))  # this process will be forked
        elif experiment.parallel.launcher == "torchrun":
            stack.enter_context(environment(**hashes))
            stack.callback(_end_unused)
            _begun.append(Forks(find_libraries(experiment)))
        elif experiment.parallel.launcher == "ray":
            stack.enter_context(environment(**hashes))
            if experiment.parallel.cluster is None:
                from pipeline.launch.cluster import LocalRay  # takes half a second

                stack.callback(LocalRay(verbose=verbose).end)
        yield


def forks() -> Forks:
    """Return the `Forks` that were started in advance, or new ones. The caller ends them."""
    return _begun.pop() if _begun else Forks()


def _end_unused() -> None:
    while _begun:
        _begun.pop().__exit__()


def find_libraries(experiment: Experiment) -> list[str]:
    """Return the libraries of built-in components, except torch; each worker imports the project's own packages."""
    targets = [component.target for _, component in components.named(experiment)]
    return sorted({target.partition(".")[0] for target in targets if target.startswith(BUILT_IN)} - _LOADED)
