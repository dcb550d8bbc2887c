"""Measurements after a training, which may fail without losing the training's result."""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from pipeline.errors import ExperimentError
from pipeline.protocol.events import Outbox, Trained, Warned
from pipeline.protocol.trial import TrialResult
from pipeline.training.context import TrainContext

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Afterwards:
    """A series of collective measurements, which ends at the first failure on this rank.

    A rank that fails skips the remaining measurements and ends with the training's result. The other ranks find its
    connections closed and do the same, or hang until the driver, which has the result by then, ends them.
    """

    def __init__(self, context: TrainContext, result: TrialResult, *, outbox: Outbox) -> None:
        self._context, self._outbox = context, outbox
        self._failed = False
        if context.rank.is_first:
            outbox.event(Trained(time=time.time(), trial=context.trial.name, result=result))

    def measure(self, what: str, measurement: Callable[[], T]) -> T | None:
        """Return a collective measurement's result; None, with a warning that names it, if it fails.

        Raises:
            ExperimentError: the experiment doesn't allow this measurement, on any rank.
        """
        if self._failed:
            return None
        try:
            return measurement()
        except ExperimentError:
            raise
        except Exception as error:  # noqa: BLE001 - no error may cost the result of the training
            _log.warning("%s could not be measured", what, exc_info=error)
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            rank = self._context.rank
            where = f" on rank {rank.rank}" if rank.world_size > 1 else ""
            message = f"{what} could not be measured{where}, the training is not affected: {said}"
            self._outbox.event(
                Warned(time=time.time(), trial=self._context.trial.name, message=message, subject="measuring")
            )
            self._failed = rank.world_size > 1
            return None
