"""Several measurements of the same thing as one."""

from collections.abc import Sequence
from statistics import median

from pipeline.protocol.estimates import over
from pipeline.protocol.trial import StepParts, TrialResult


def parts_of(results: Sequence[TrialResult]) -> StepParts:
    """The parts of a step: medians over the measurements that have them."""
    parts = [result.parts for result in results]
    held = [part.held_ms for part in parts if part.held_ms is not None]
    return StepParts(
        held_ms=over(held) if held else None,
        compute_ms=_known([part.compute_ms for part in parts]),
        exposed_communication_ms=_known([part.exposed_communication_ms for part in parts]),
        data_wait_ms=median(part.data_wait_ms for part in parts),
        rest_ms=_known([part.rest_ms for part in parts]),
        ranks=tuple(map(over, zip(*(part.ranks for part in parts if part.ranks), strict=True))),
        nodes=parts[0].nodes,
    )


def _known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
