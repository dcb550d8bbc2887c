"""``pipeline compare``: what differs between recorded runs, and which of them is better, beyond the luck of seeds."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import rich.console
from rich.table import Table
from rich.text import Text

from pipeline.commands.compare.difference import Difference, difference, show_difference
from pipeline.commands.compare.variants import Pairs, Variant, choose_metric, direction_of, divide, pair, read_training
from pipeline.config.values import Direction, Frozen
from pipeline.errors import UsageError
from pipeline.recording.journal.run_summary import RunSummary
from pipeline.recording.terminal.terminal import print_table, write
from pipeline.report.numbers.paired import Answer, answer, have_spread, is_rate, judge_together
from pipeline.wording import counted, figure

CLAIM = "This is about the luck of training (seeds) on this data. It does not cover other data."


class ComparedVariant(Frozen):
    """A variant and its runs."""

    name: str
    runs: Mapping[int, str]
    """Ids of the runs by seed."""

    @property
    def title(self) -> str:
        """Name and runs in a line."""
        if len(self.runs) == 1:
            return f"{self.name}  {next(iter(self.runs.values()))}"
        return f"{self.name}  {counted(len(self.runs), 'run')} with seeds {', '.join(map(str, self.runs))}"


class ComparedPair(Frozen):
    """A variant compared with the first one."""

    variant: ComparedVariant
    difference: Difference
    """Differences between the first run of each."""
    answer: Answer | None = None
    """None if no pair has values to compare."""
    values: Mapping[int, tuple[float, float]] = {}
    """Values of the metric of both variants, by seed."""


class ComparedRuns(Frozen):
    """Recorded runs that were compared."""

    first: ComparedVariant
    others: tuple[ComparedPair, ...]
    notes: tuple[str, ...]

    @property
    def answers(self) -> tuple[str, ...]:
        """The answer for each of the other variants."""
        several = len(self.others) > 1
        return tuple(
            (f"{self.first.name} and {one.variant.name}: " if several and one.answer.verdict == "inconclusive" else "")
            + one.answer.format(self.first.name, one.variant.name)
            for one in self.others
            if one.answer is not None
        )

    def to_json(self) -> str:
        """Return the first answer with all else below it; what could not be answered is null."""
        answered = self.others[0].answer
        known = dict.fromkeys(Answer.model_fields) if answered is None else _plain(answered)
        below = {
            "variants": {one.name: dict(one.runs) for one in (self.first, *(other.variant for other in self.others))},
            "notes": self.notes,
            "others": [_plain(one) for one in self.others[1:]],
        }
        return json.dumps({**known, **below, **_plain(self.others[0].difference)}, indent=2)


def _plain(model: Frozen) -> dict[str, Any]:
    """Return a model as JSON has it, where NaN and infinity are null."""
    found: dict[str, Any] = json.loads(model.model_dump_json())
    return found


def compare_runs(
    runs: Sequence[RunSummary], *, metric: str | None = None, mode: Direction | None = None, margin: float | None = None
) -> ComparedRuns:
    """Compare at least two recorded runs: each variant among them with the first.

    Args:
        runs: the runs, in the order in which they were named.
        metric: name of the metric to compare by; None for ``checkpoint.best``, or else a validation metric.
        mode: direction in which it improves; None if it is known.
        margin: difference up to which variants count as equal, in points for a rate.

    Raises:
        UsageError: there is no such metric, or only one variant.
    """
    if any(one.command != "run" for one in runs):
        if metric is not None:
            raise UsageError("--metric compares trainings, and not all of these runs are trainings")
        return _without_answer(runs)
    variants, notes = divide([read_training(one) for one in runs])
    first, *rest = variants
    try:
        chosen = choose_metric([one for variant in variants for one in variant.runs.values()], metric)
        better = direction_of(chosen, first.first, mode=mode)
    except UsageError as error:
        if metric is not None:
            raise
        notes.append(str(error))
        return _assemble(first, [(other, None, {}) for other in rest], notes=notes)
    paired = [(other, pair(first, other, metric=chosen)) for other in rest]
    notes += [note for _, pairs in paired for note in pairs.notes]
    answers = _answer([pairs for _, pairs in paired], metric=chosen, direction=better, margin=margin)
    notes += _explain(answers, first=first, others=rest)
    left = iter(answers)
    return _assemble(
        first, [(other, next(left) if pairs.values else None, pairs.values) for other, pairs in paired], notes=notes
    )


def _answer(paired: Sequence[Pairs], *, metric: str, direction: Direction, margin: float | None) -> list[Answer]:
    """Answer for each variant that has pairs, in one unit, so that the answers hold together."""
    values = [value for pairs in paired for both in pairs.values.values() for value in both]
    rated = is_rate(values, direction=direction)
    answers = [
        answer(
            pairs.values,
            metric=metric,
            direction=direction,
            is_rate=rated,
            are_identical=pairs.are_identical,
            margin=margin,
        )
        for pairs in paired
        if pairs.values
    ]
    return judge_together(answers) if len(answers) > 1 else answers


def _explain(answers: Sequence[Answer], *, first: Variant, others: Sequence[Variant]) -> Iterator[str]:
    """Yield notes on what the answers do not show."""
    if len(answers) > 1:
        yield f"{len(answers)} variants are compared with {first.name}: their intervals are wider (Holm)"
    if any(one.verdict == "inconclusive" and one.pairs > 1 and not have_spread(one.differences) for one in answers):
        yield "all pairs have the same difference. From six pairs on, that is an answer"
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
    other = ComparedPair(variant=ComparedVariant(name="B", runs={0: second.run}), difference=difference(first, second))
    return ComparedRuns(first=ComparedVariant(name="A", runs={0: first.run}), others=(other,), notes=())


def _assemble(
    first: Variant,
    others: Sequence[tuple[Variant, Answer | None, Mapping[int, tuple[float, float]]]],
    *,
    notes: Sequence[str],
) -> ComparedRuns:
    def list_runs(variant: Variant) -> ComparedVariant:
        return ComparedVariant(name=variant.name, runs={seed: one.run.run for seed, one in variant.runs.items()})

    return ComparedRuns(
        first=list_runs(first),
        others=tuple(
            ComparedPair(
                variant=list_runs(other),
                difference=difference(first.first.run, other.first.run),
                answer=found,
                values=values,
            )
            for other, found, values in others
        ),
        notes=tuple(notes),
    )


def show_compared(compared: ComparedRuns, *, console: rich.console.Console) -> None:
    """Print the answers, what differs, the pairs, and the answers again."""
    for line in compared.answers:
        console.print(Text(line, style="bold"), soft_wrap=True)
    if compared.answers:
        console.print()
    for other in compared.others:
        is_single = len(compared.first.runs) == len(other.variant.runs) == 1
        titles = (compared.first.title, other.variant.title)
        show_difference(other.difference, titles=titles, with_results=is_single, console=console)
        if other.answer is not None:
            console.print("", Text(other.answer.metric, style="bold"), sep="\n")
            print_table(_table(compared.first.name, other), console=console)
    if compared.notes:
        console.print()
    for note in compared.notes:
        write(console, f"note: {note}")
    if compared.answers:
        console.print()
        write(console, CLAIM)
    for line in compared.answers:
        console.print(Text(line, style="bold"), soft_wrap=True)


def _table(first: str, other: ComparedPair) -> Table:
    table = Table(box=None, pad_edge=False, show_header=True, padding=(0, 2, 0, 0))
    assert other.answer is not None
    unit = f", {other.answer.unit}" if other.answer.unit else ""
    for name in ("seed", first, other.variant.name, f"{other.variant.name} - {first}{unit}"):
        table.add_column(name, justify="right")
    for (seed, values), difference_ in zip(other.values.items(), other.answer.differences, strict=True):
        table.add_row(str(seed), *(figure(value) for value in values), f"{difference_:+.3g}")
    return table
