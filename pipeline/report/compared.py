"""The answer of `pipeline compare`: its variants, the pairs of their trainings, and what is said about them."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ConfigDict

from pipeline.experiment.values import Frozen
from pipeline.results.paired import Answer
from pipeline.report.numbers.time_to_target import CLAIM as TIME_CLAIM
from pipeline.report.numbers.time_to_target import TimeToTarget
from pipeline.report.text.tables import ReportTable
from pipeline.wording import counted, figure

FILE_NAME = "compare.json"
"""File name of a `Compared` in a study's folder."""
CLAIM = "This is about the luck of training (seeds) on this data. It does not cover other data."


class ComparedVariant(Frozen):
    """A variant and its runs."""

    name: str
    """A for the first one, and so on."""
    runs: Mapping[int, str]
    """Ids of the runs by seed."""
    description: str = ""
    """File or settings of the variant in a study."""

    @property
    def title(self) -> str:
        """Name and runs in a line."""
        if len(self.runs) == 1:
            return f"{self.name}  {next(iter(self.runs.values()))}"
        return f"{self.name}  {counted(len(self.runs), 'run')} with seeds {', '.join(map(str, self.runs))}"

    @property
    def full_name(self) -> str:
        """Name and description."""
        return f"{self.name} ({self.description})" if self.description else self.name


class ComparedPair(Frozen):
    """A variant compared with the first one."""

    variant: ComparedVariant
    answer: Answer | None = None
    """None if no pair has values to compare."""
    values: Mapping[int, tuple[float, float]] = {}
    """Values of the metric of both variants, by seed."""
    time: TimeToTarget | None = None
    """Time to target; None unless the trainings had the machine to themselves."""


class Compared(Frozen):
    """Trainings that were compared."""

    model_config = ConfigDict(ser_json_inf_nan="null")

    first: ComparedVariant
    others: tuple[ComparedPair, ...]
    notes: tuple[str, ...]
    experiment: str = ""
    hardware: str = ""
    run: str = ""
    """Id of the study; empty for runs that were trained one by one."""
    settings: Mapping[str, tuple[str | None, ...]] = {}
    """Settings in which the variants of a study differ, with the value of each variant; None: not set."""
    left: int = 0
    """Trainings of the study that have not ended."""

    @property
    def answers(self) -> tuple[str, ...]:
        """The answer for each of the other variants."""
        return tuple(self._answers())

    def _answers(self) -> Iterator[str]:
        several = len(self.others) > 1
        for one in self.others:
            if (found := one.answer) is None:
                continue
            is_named = several and found.verdict == "inconclusive"
            named = f"{self.first.name} and {one.variant.name}: " if is_named else ""
            text = f"{named}{found.format(self.first.name, one.variant.name)}"
            more = len(self.first.runs) + (found.more_pairs or 0)
            option = f": --seeds {more} --resume {self.run.rpartition('-')[2]}"
            yield f"{text}{option if self.run and found.more_pairs else ''}"

    @property
    def times(self) -> tuple[str, ...]:
        """The time to target of each of the other variants."""
        return tuple(
            line
            for one in self.others
            if one.time is not None
            for line in one.time.format(self.first.full_name, one.variant.full_name)
        )

    @property
    def differing(self) -> tuple[str, ...]:
        """The settings in which the variants differ, each with its values."""
        names = [self.first.name, *(one.variant.name for one in self.others)]
        return tuple(
            f"{key}: {', '.join(f'{name} {value}' for name, value in zip(names, values, strict=True))}"
            for key, values in self.settings.items()
        )

    @property
    def claims(self) -> tuple[str, ...]:
        """Sentences on what the answer does not cover."""
        return (CLAIM, TIME_CLAIM) if self.times else (CLAIM,)

    # What follows makes it a report, see `pipeline.record.screen.Printable`.

    @property
    def name(self) -> str:
        """Name of the experiment."""
        return self.experiment

    @property
    def opening(self) -> tuple[str, ...]:
        """Lines above the tables: the answers, the experiment and the machine."""
        return (self.verdict, f"{self.experiment}: {self._count()}", self.hardware)

    def _count(self) -> str:
        total = sum(len(one.runs) for one in (self.first, *(other.variant for other in self.others)))
        return f"{counted(total, 'training')}{f', {self.left} not completed' if self.left else ''}"

    @property
    def tables(self) -> tuple[ReportTable, ...]:
        """A table of the pairs for each of the other variants."""
        return tuple(self._table(one) for one in self.others if one.answer is not None)

    def _table(self, one: ComparedPair) -> ReportTable:
        assert one.answer is not None
        name, unit = one.variant.name, f", {one.answer.unit}" if one.answer.unit else ""
        return ReportTable(
            title=one.answer.metric,
            header=("seed", self.first.name, name, f"{name} - {self.first.name}{unit}"),
            rows=tuple(
                (str(seed), *(figure(value) for value in values), f"{difference:+.3g}")
                for (seed, values), difference in zip(one.values.items(), one.answer.differences, strict=True)
            ),
        )

    @property
    def verdict(self) -> str:
        """All answers in a line."""
        return "; ".join(self.answers) or "No pair of trainings can be compared"

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        """Lines below the tables."""
        return tuple(filter(None, (self.times, self.differing, self.notes, self.claims)))

    def markdown(self) -> str:
        """Return the answer in Markdown, for the description of the study's run in MLflow."""
        lines = [f"**{self.verdict}**", "", *self.times, *(f"- {line}" for line in self.differing), ""]
        for table in self.tables:
            lines += [f"| {' | '.join(table.header)} |", f"|{'---|' * len(table.header)}"]
            lines += [f"| {' | '.join(row)} |" for row in table.rows]
            lines.append("")
        return "\n".join([*lines, *(f"- {note}" for note in self.notes), "", *self.claims])

    @property
    def tags(self) -> dict[str, str]:
        """Tags of the study's run: the first answer."""
        if (answer := self.others[0].answer) is None:
            return {"verdict": "none"}
        difference = f"{answer.difference:+.4g}{f' {answer.unit}' if answer.unit else ''}"
        return {"verdict": answer.verdict, "difference": difference, "pairs": str(answer.pairs)}

    def to_mapping(self) -> dict[str, Any]:
        """Return the first answer with all else below it, as JSON has it; what could not be answered is null."""
        first, *rest = self.others
        known = dict.fromkeys(Answer.model_fields) if first.answer is None else plain(first.answer)
        variants = (self.first, *(one.variant for one in self.others))
        return {
            **known,
            "variants": {one.name: dict(one.runs) for one in variants},
            "time_to_target": plain(first.time) if first.time is not None else None,
            "notes": self.notes,
            "others": [plain(one) for one in rest],
        }


def plain(model: Frozen) -> dict[str, Any]:
    """Return a model as JSON has it, where NaN and infinity are null."""
    found: dict[str, Any] = json.loads(model.model_dump_json())
    return found
