"""One result of the repeated measurements of a trial."""

from collections.abc import Sequence
from statistics import median

from pipeline.protocol import estimates
from pipeline.protocol.trial_result import Spread, StepParts, TrialResult


def merge_repeats(results: Sequence[TrialResult]) -> TrialResult:
    """Return the first result with the times, memory and utilization of all repeats; each repeat is a slot."""
    merged = {
        "samples_per_second": _throughput(results),
        "slots": _repeats(results) if len(results) > 1 else results[0].slots,
        "step_ms": _over([result.step_ms for result in results]),
        "parts": _parts_of(results),
        "peak_memory_mb": tuple(map(max, zip(*(result.peak_memory_mb for result in results), strict=True))),
        "gpu_utilization": tuple(map(median, zip(*(result.gpu_utilization for result in results), strict=True))),
        "costs": None,
    }
    return results[0].model_copy(update=merged)


def _parts_of(results: Sequence[TrialResult]) -> StepParts:
    """Return the parts of a step as medians over the repeats that measured them."""
    parts = [result.parts for result in results]
    held = [part.held_ms for part in parts if part.held_ms is not None]
    return StepParts(
        held_ms=_over(held) if held else None,
        compute_ms=_find_median([part.compute_ms for part in parts]),
        exposed_communication_ms=_find_median([part.exposed_communication_ms for part in parts]),
        data_wait_ms=median(part.data_wait_ms for part in parts),
        rest_ms=_find_median([part.rest_ms for part in parts]),
        ranks=tuple(map(_over, zip(*(part.ranks for part in parts if part.ranks), strict=True))),
        nodes=parts[0].nodes,
    )


def _find_median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _throughput(results: Sequence[TrialResult]) -> Spread:
    """Return the throughput of a trial; its middle is the geometric mean of slots or repeats, whose ratios compare."""
    if len(repeats := _repeats(results)) == 1:
        return results[0].samples_per_second
    return estimates.geometric_spread(repeats)


def _repeats(results: Sequence[TrialResult]) -> tuple[float, ...]:
    return results[0].slots or tuple(result.samples_per_second.median for result in results)


def _over(spreads: Sequence[Spread]) -> Spread:
    """Return the spread of a single measurement's windows, or of the medians of several measurements."""
    return spreads[0] if len(spreads) == 1 else estimates.spread([one.median for one in spreads], keeps_values=True)
