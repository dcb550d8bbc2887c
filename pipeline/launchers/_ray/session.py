"""A session's connection to Ray. An existing cluster receives the code, and each node is checked once."""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Self

from pipeline.cluster.checks import look_around, refuse_others
from pipeline.cluster.code import Code, sent, to_send
from pipeline.cluster.join import connected
from pipeline.cluster.node_facts import facts_here
from pipeline.cluster.nodes import facts_of_nodes
from pipeline.cluster.placement import able_nodes, node_name
from pipeline.launchers._ray.early import local_ray
from pipeline.launchers.base import Session
from pipeline.protocol.events import Warned
from pipeline.protocol.trial import Baseline, Training, Trial
from pipeline.training.checkpoints.storage import address_of

_SHOWN = 5


class Joined:
    """A session's connection to Ray; a local Ray needs no code and no checks."""

    def __init__(self, session: Session, *, address: str | None, code: Code, untracked: tuple[str, ...]) -> None:
        self.code = code
        self._session = session
        self._is_local = address is None
        self._untracked = untracked
        self._seen: set[str] = set()

    @classmethod
    @contextmanager
    def session(cls, session: Session, *, address: str | None) -> Iterator[Self]:
        """Connect for the duration of a session.

        Raises:
            ResourceError: no cluster answers, or the code can't be sent.
        """
        package = to_send(session.parallel, joined=address is not None)
        untracked = tuple(map(str, package.untracked_code)) if package else ()
        with ExitStack() as stack:
            code, runtime_env = stack.enter_context(sent(package, joined=address is not None))
            if address is None:
                stack.enter_context(local_ray(session.parallel, streams=session.streams, verbose=session.verbose))
            else:
                stack.enter_context(connected(address, verbose=session.verbose, runtime_env=runtime_env))
            yield cls(session, address=address, code=code, untracked=untracked)

    def check_nodes(self, trial: Trial) -> None:
        """Check nodes that may get workers and weren't checked yet: a lost node may be replaced by a new one.

        Raises:
            ResourceError: everything that the nodes lack.
        """
        able: Mapping[str, Mapping[str, Any]] = {} if self._is_local else able_nodes(self._session.parallel)
        new = {id_: node_name(node) for id_, node in able.items() if id_ not in self._seen}
        if not new:
            return
        if self._seen:  # the first nodes were asked for their facts when the run was planned
            facts = facts_of_nodes(timeout_s=self._session.parallel.start_timeout_s)
            refuse_others([node for node in facts if node.ray_node in new], here=facts_here())
        elif self._untracked:
            self._warn(
                f"not sent to the cluster, because git doesn't track it: {_listed(self._untracked)}; git add it", trial
            )
        for note in look_around(trial.experiment, nodes=new, code=self.code, checkpoints=self._checkpoints(trial)):
            self._warn(note, trial)
        self._seen |= new.keys()

    def _checkpoints(self, trial: Trial) -> str | None:
        """Return the address of the checkpoints, also for the baseline: it runs first, so a mistake shows early."""
        options = trial.experiment.checkpoint
        if not (isinstance(trial, Training | Baseline) and options.keep):
            return None
        return address_of(options.directory, run=self._session.folder)

    def _warn(self, message: str, trial: Trial) -> None:
        self._session.receive(Warned(time=time.time(), trial=trial.name, message=message))


def _listed(paths: tuple[str, ...]) -> str:
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more
