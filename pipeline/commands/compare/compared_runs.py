"""``pipeline compare RUN...``: what differs between recorded runs, and which is better, beyond the luck of seeds."""

import json
from collections.abc import Iterator, Sequence

import rich.console
from rich.text import Text

from pipeline.commands.compare.difference import Difference, difference, show_difference
from pipeline.commands.compare.variants import Pairs, Variant, choose_metric, direction_of, divide, pair, read_training
from pipeline.errors import UsageError
from pipeline.experiment.values import Direction, Frozen
from pipeline.protocol.estimates import CONFIDENCE
from pipeline.record.run_summary import RunSummary
from pipeline.record.screen import print_report_table, write
from pipeline.report.compared import Compared, ComparedPair, ComparedVariant, plain
from pipeline.results.paired import Answer, answer, have_spread, is_rate, judge_together


class Question(Frozen):
    """Metric, margin and target of a comparison."""

    metric: str | None = None
    """Name of the metric; None for ``checkpoint.best``, or else a validation metric."""
    mode: Direction | None = None
    """Direction in which it improves; None if it is known."""
    margin: float | None = None
    """Difference up to which variants count as equal, in points for a rate."""
    target: float | None = None
    """Value whose time is compared; None for one that all trainings reach."""


class ComparedRuns(Frozen):
    """Recorded runs that were compared."""

    compared: Compared
    differences: tuple[Difference, ...]
    """Differences between the first run of the first variant and the first run of each other variant."""

    def to_json(self) -> str:
        """Return the first answer and its differences, with all else below them."""
        return json.dumps({**self.compared.to_mapping(), **plain(self.differences[0])}, indent=2)


def compare_runs(runs: Sequence[RunSummary], question: Question = Question()) -> ComparedRuns:  # noqa: B008 - frozen
    """Compare at least two recorded runs, in the order in which they were named: each variant with the first.

    Raises:
        UsageError: there is no such metric, or only one variant.
    """
    if any(one.command != "run" for one in runs):
        if question.metric is not None:
            raise UsageError("--metric compares trainings, and not all of these runs are trainings")
        return _without_answer(runs)
    variants, notes = divide([read_training(one) for one in runs])
    first, *rest = variants
    compared = compare_variants(variants, question, notes=notes)
    return ComparedRuns(
        compared=compared, differences=tuple(difference(first.first.run, other.first.run) for other in rest)
    )


def compare_variants(
    variants: Sequence[Variant],
    question: Question,
    *,
    notes: Sequence[str] = (),
    confidence: float = CONFIDENCE,
    next_confidence: float | None = None,
) -> Compared:
    """Compare each of several variants with the first.

    Args:
        variants: the variants, with at least one run each.
        question: what they are compared by.
        notes: notes on the runs.
        confidence: level of the intervals.
        next_confidence: level at which further pairs would be answered; None: the same.

    Raises:
        UsageError: there is no such metric. Without a metric in the question, a note says so.
    """
    first, *rest = variants
    gathered = list(notes)
    try:
        chosen = choose_metric([one for variant in variants for one in variant.runs.values()], question.metric)
        better = direction_of(chosen, first.first, mode=question.mode)
    except UsageError as error:
        if question.metric is not None:
            raise
        others = [ComparedPair(variant=list_runs(other)) for other in rest]
        return Compared(first=list_runs(first), others=tuple(others), notes=(*gathered, str(error)))
    paired = [pair(first, other, metric=chosen) for other in rest]
    gathered += [note for pairs in paired for note in pairs.notes]
    answers = _answer(
        paired,
        metric=chosen,
        direction=better,
        margin=question.margin,
        confidence=confidence,
        next_confidence=next_confidence,
    )
    gathered += _explain(answers, first=first, others=rest)
    left = iter(answers)
    others = [
        ComparedPair(variant=list_runs(other), answer=next(left) if pairs.values else None, values=pairs.values)
        for other, pairs in zip(rest, paired, strict=True)
    ]
    return Compared(first=list_runs(first), others=tuple(others), notes=tuple(gathered))


def list_runs(variant: Variant) -> ComparedVariant:
    """Return a variant with the ids of its runs."""
    return ComparedVariant(name=variant.name, runs={seed: one.run.run for seed, one in variant.runs.items()})


def _answer(
    paired: Sequence[Pairs],
    *,
    metric: str,
    direction: Direction,
    margin: float | None,
    confidence: float,
    next_confidence: float | None,
) -> list[Answer]:
    """Answer for each variant that has pairs, in one unit, so that the answers hold together."""
    values = [value for pairs in paired for both in pairs.values.values() for value in both]
    rated = is_rate(metric, values, direction=direction)
    answers = [
        answer(
            pairs.values,
            metric=metric,
            direction=direction,
            is_rate=rated,
            are_identical=pairs.are_identical,
            margin=margin,
            confidence=confidence,
            next_confidence=next_confidence,
        )
        for pairs in paired
        if pairs.values
    ]
    if len(answers) < 2:
        return answers
    return judge_together(answers, confidence=confidence, next_confidence=next_confidence)


def _explain(answers: Sequence[Answer], *, first: Variant, others: Sequence[Variant]) -> Iterator[str]:
    """Yield notes on what the answers do not show."""
    if len(answers) > 1:
        yield f"{len(answers)} variants are compared with {first.name}: their intervals are wider (Holm)"
    if any(one.verdict == "inconclusive" and one.pairs > 1 and not have_spread(one.differences) for one in answers):
        yield "all pairs have the same difference. Enough pairs make that an answer: six at 95%"
    if any(not first.runs.keys() & other.runs.keys() for other in others):
        yield "runs without a partner of the same seed have no answer. Train them with: pipeline run FILE seed=N"
    if any(one.is_skewed for one in answers):
        yield "the differences of the pairs are skewed, so the interval may be too narrow. Train more pairs"


def _without_answer(runs: Sequence[RunSummary]) -> ComparedRuns:
    """Compare two runs that are not both trainings by their results and settings.

    Raises:
        UsageError: there are more than two.
    """
    if len(runs) != 2:
        wrong = next(one for one in runs if one.command != "run")
        raise UsageError(
            f"{wrong.run} is a {wrong.command}. More than two runs can only be compared if all are trainings."
        )
    first, second = runs
    other = ComparedPair(variant=ComparedVariant(name="B", runs={0: second.run}))
    compared = Compared(first=ComparedVariant(name="A", runs={0: first.run}), others=(other,), notes=())
    return ComparedRuns(compared=compared, differences=(difference(first, second),))


def show_compared(runs: ComparedRuns, *, console: rich.console.Console) -> None:
    """Print the answers, what differs, the pairs, and the answers again."""
    compared = runs.compared
    for line in compared.answers:
        console.print(Text(line, style="bold"), soft_wrap=True)
    if compared.answers:
        console.print()
    tables = iter(compared.tables)
    for other, found in zip(compared.others, runs.differences, strict=True):
        is_single = len(compared.first.runs) == len(other.variant.runs) == 1
        titles = (compared.first.title, other.variant.title)
        show_difference(found, titles=titles, with_results=is_single, console=console)
        if other.answer is not None:
            console.print()
            print_report_table(next(tables), console=console)
    if compared.notes:
        console.print()
    for note in compared.notes:
        write(console, f"note: {note}")
    if compared.answers:
        console.print()
        write(console, compared.claims[0])
    for line in compared.answers:
        console.print(Text(line, style="bold"), soft_wrap=True)
