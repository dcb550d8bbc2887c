"""When the ranks report: every so many steps, but not so often that reporting itself takes much of the time."""

from pipeline.training.context import TrainContext

SHORTEST_MS = 100.0
"""Between two reports, unless something else makes one due. The ranks exchange what they report: that takes as long as
a short step does, and nobody reads faster."""


class Cadence:
    """Knows when the next report is due. All ranks agree: what it goes by is the same on all of them."""

    def __init__(self, context: TrainContext) -> None:
        self._context = context
        self._log_every = context.experiment.train.log_every_steps
        self._last = 0
        self._intervals = 1

    def is_due(self, steps: int) -> bool:
        """Whether to report after that many steps: in regular intervals, at the end of an epoch, before a checkpoint.

        A measurement reports after its warm-up and after each of its windows.
        """
        context, measure = self._context, self._context.experiment.measure
        in_epoch = steps % context.order.steps_per_epoch
        if not in_epoch or steps == context.steps:
            return True
        if context.trial.is_measurement:
            return steps >= measure.warmup_steps and (steps - measure.warmup_steps) % measure.steps == 0
        if in_epoch % self._log_every == 0 and steps - self._last >= self._intervals * self._log_every:
            return True
        return context.is_checkpoint_step(steps)

    def reported(self, steps: int, *, step_ms: float) -> None:
        """A report was made after that many steps, the last of which took ``step_ms`` in the mean over all ranks."""
        self._last = steps
        self._intervals = max(1, int(SHORTEST_MS / (step_ms * self._log_every)))
