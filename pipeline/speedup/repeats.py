"""Several measurements of the same thing as one."""

from collections.abc import Sequence
from statistics import median

from pipeline.contract import Spread, StepParts, TrialResult


def over(spreads: Sequence[Spread]) -> Spread:
    """The windows' spread of a single measurement; that of the medians of several."""
    if len(spreads) == 1:
        return spreads[0]
    medians = [spread.median for spread in spreads]
    return Spread(median=median(medians), low=min(medians), high=max(medians), windows=len(medians))


def parts_of(results: Sequence[TrialResult]) -> StepParts:
    """The parts of a step: medians over the measurements."""
    parts = [result.parts for result in results]
    waits = [part.exposed_communication_ms for part in parts if part.exposed_communication_ms is not None]
    return StepParts(
        step_ms=over([part.step_ms for part in parts]),
        compute_ms=median(part.compute_ms for part in parts),
        exposed_communication_ms=median(waits) if waits else None,
        data_wait_ms=median(part.data_wait_ms for part in parts),
        rest_ms=median(part.rest_ms for part in parts),
        ranks_ms=tuple(map(median, zip(*(part.ranks_ms for part in parts), strict=True))),
        nodes=parts[0].nodes,
    )
