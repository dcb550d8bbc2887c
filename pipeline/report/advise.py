"""What to change: a few lines from what was measured, each with the figures that it comes from.

One rule for each thing: `strategy_advice`, `exchange_advice`, `step_advice`. Only what was measured counts: rules look
at `Row`s, never at names of models or machines. What this run measured to be faster is advised; all else is a question.
"""

from collections.abc import Iterator, Sequence

from pipeline.config.schema import Experiment
from pipeline.report import Advice, Row, exchange_advice, step_advice
from pipeline.report.report import Report
from pipeline.report.rule import Case, Finding
from pipeline.report.strategy_advice import better

MOST = 5
"""Lines; more than that nobody follows."""


def advise(report: Report, *, experiment: Experiment, cores: int | None) -> tuple[Advice, ...]:
    """At most `MOST` pieces of advice, what was measured first, then what is worth a try, those that save most first.

    Args:
        report: of a run or of a comparison.
        experiment: as its file declares it.
        cores: of each node of the machine; None if unknown.
    """
    own = declared(report, experiment)
    findings = sorted(
        _findings(report, own, experiment=experiment, cores=cores), key=lambda one: (not one.is_measured, -one.gain)
    )
    return tuple(finding.advice for finding in _agreeing(findings)[:MOST])


def declared(report: Report, experiment: Experiment) -> Row:
    """The row of what the file's ``parallel`` declares; if a comparison didn't measure it, of its result."""
    if not report.is_comparison:
        return report.main
    parallel = experiment.parallel
    wanted = (parallel.strategy, parallel.workers, dict(parallel.options))
    rows = (row for row in report.rows if row.role in ("baseline", "cell") and row.scaling == "strong")
    return next((row for row in rows if (row.strategy, row.workers, dict(row.options)) == wanted), report.main)


def _findings(report: Report, own: Row, *, experiment: Experiment, cores: int | None) -> Iterator[Finding]:
    """Where another row is better, the advice is to go there, and what else is said is about that row.

    Unless a straggler or a slow link, both of which can be mended, are all that keeps the own row from being better.
    """
    case = Case(row=own, experiment=experiment, cores=cores)
    mendable = list(filter(None, [step_advice.straggler(case), exchange_advice.communication_hook(case)]))
    found = better(report.rows, case)
    if found is None or any(1 - finding.gain < found.row_time for finding in mendable):
        yield from mendable
    else:
        yield found.finding
        yield from filter(None, [step_advice.straggler(case)])
        case = Case(row=found.row, experiment=experiment, cores=cores)
        yield from filter(None, [exchange_advice.communication_hook(case)])
    yield from _others(case, report.rows)


def _others(case: Case, rows: Sequence[Row]) -> Iterator[Finding]:
    """What is true of the case besides."""
    batch = exchange_advice.larger_batch(case)  # brings a learning rate with it
    rate = None if batch else step_advice.learning_rate(case, rows)
    rules = (step_advice.data_wait(case), exchange_advice.unused_search(case), step_advice.idle_cores(case, rows))
    yield from filter(None, [batch, rate, *rules])


def _agreeing(findings: list[Finding]) -> list[Finding]:
    """Without those that would write what one before writes."""
    kept: list[Finding] = []
    for finding in findings:
        if not any(finding.values.keys() & other.values.keys() for other in kept):
            kept.append(finding)
    return kept
