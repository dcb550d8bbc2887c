"""What a launcher begins while the experiment is still being checked: its processes take as long to start.

A command calls `given` as soon as it has read the file, before it imports torch. The launcher asks for what was begun.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from pipeline.config import components
from pipeline.config.project import BUILT_IN
from pipeline.config.schema import Experiment
from pipeline.launchers._forks import Forks
from pipeline.system.process import outer_rank

_LOADED = {"torch", "pipeline", "ray"}
_begun: list[Forks] = []


@contextmanager
def given(experiment: Experiment, *, verbose: bool = False) -> Iterator[None]:
    """Begin to start what the experiment's launcher will need; ends what nobody has asked for.

    Args:
        experiment: what will be run.
        verbose: whether to let the launcher's and the workers' output through to the terminal.
    """
    with ExitStack() as stack:
        if experiment.parallel.launcher == "torchrun" and outer_rank() is None:
            stack.callback(_end_unused)
            _begun.append(Forks(_libraries(experiment)))
        elif experiment.parallel.launcher == "ray":
            from pipeline.launchers._ray import early  # takes half a second

            stack.callback(early.end_begun)
            early.begin(experiment, verbose=verbose)
        yield


def forks() -> Forks:
    """A starter of worker processes, which was begun before if there was a head start. The caller ends it."""
    return _begun.pop() if _begun else Forks()


def _end_unused() -> None:
    while _begun:
        _begun.pop().__exit__()


def _libraries(experiment: Experiment) -> list[str]:
    """What its components come from, beside torch. The project's own packages are for each worker to import."""
    targets = [component.target for _, component in components.named(experiment)]
    return sorted({target.partition(".")[0] for target in targets if target.startswith(BUILT_IN)} - _LOADED)
