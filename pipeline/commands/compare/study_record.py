"""Record of a study in its folder: what is compared, and when it was looked at, for sessions that resume it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

from pipeline.commands.compare.compared_runs import Question
from pipeline.errors import UsageError
from pipeline.experiment.values import Frozen
from pipeline.record.folder import FolderFile
from pipeline.report.numbers.looks import confidence_of_look

RECORD_NAME = "study.json"


class Looks(Frozen):
    """Numbers of pairs at which the answer is looked at, in one plan: once, or until it is clear."""

    pairs: tuple[int, ...]
    is_seen: bool = False
    """True once an answer before the last look was printed."""
    answered_at: int | None = None
    """Pairs of the last answer of the plan, once it was printed: pairs that are added later are an extension."""


class StudyRecord(Frozen, FolderFile):
    """A study as it was planned and extended."""

    file_name: ClassVar[str] = RECORD_NAME

    question: Question
    descriptions: Mapping[str, str]
    """File or settings of each variant, by its name."""
    settings: Mapping[str, Mapping[str, str]]
    """Settings of each variant, by its name and their keys."""
    is_alone: bool
    looks: tuple[Looks, ...]
    notes: tuple[str, ...] = ()
    """Notes of the sessions, e.g. on other load."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the record of a study.

        Raises:
            UsageError: it is missing or damaged.
        """
        if (record := super().read(folder)) is None:
            raise UsageError(f"{folder / RECORD_NAME} can't be read, so the study can't be continued")
        return record

    @property
    def _sizes(self) -> list[int]:
        return [len(one.pairs) for one in self.looks]

    @property
    def confidence(self) -> float:
        """Confidence level of the interval at each look of the last plan."""
        return confidence_of_look(self._sizes, index=len(self.looks) - 1)

    @property
    def next_confidence(self) -> float:
        """Confidence level of the interval if the study is extended once more, by a number of pairs."""
        return confidence_of_look([*self._sizes, 1], index=len(self.looks))

    def last_look(self, ended: int) -> int | None:
        """Return the last look that a number of pairs allows; None before the first one."""
        last = self.looks[-1]
        if last.answered_at is not None:
            return last.answered_at
        return max((look for look in last.pairs if look <= ended), default=None)

    def extend(self, looks: Sequence[int], *, has_failures: bool = False) -> Self:
        """Return the record with the looks of this session.

        Args:
            looks: numbers of pairs at which this session is to look at the answer.
            has_failures: True if trainings have failed, which this session trains again.

        Raises:
            UsageError: all of these pairs have been answered, or the plan changes after a look at it.
        """
        last = self.looks[-1]
        if last.answered_at is None and (tuple(looks) == last.pairs or not last.is_seen):
            return self._with_last(pairs=tuple(looks))
        if last.answered_at is None:
            raise UsageError(
                f"--resume: the study is to be looked at after {', '.join(map(str, last.pairs))} pairs, and was looked "
                "at already. Continue it with the same --seeds, --until-clear and --at-most."
            )
        more = tuple(pairs for pairs in looks if pairs > last.answered_at)
        if not more and not has_failures:
            raise UsageError(
                f"--resume: the study has its answer from {last.answered_at} pairs. For more pairs, use --seeds, e.g. "
                f"--seeds {2 * last.answered_at} --resume"
            )
        return self.model_copy(update={"looks": (*self.looks, Looks(pairs=more or (last.answered_at,)))})

    def mark_seen(self) -> Self:
        """Return the record after a look at the answer that was not the last one."""
        return self._with_last(is_seen=True)

    def mark_answered(self, pairs: int) -> Self:
        """Return the record after the answer of the last plan, from a number of pairs."""
        return self._with_last(answered_at=pairs)

    def _with_last(self, **changes: object) -> Self:
        *earlier, last = self.looks
        return self.model_copy(update={"looks": (*earlier, last.model_copy(update=changes))})


def find_differing(settings: Sequence[Mapping[str, str]]) -> dict[str, tuple[str | None, ...]]:
    """Return the keys whose values differ between variants, with the value of each; None: not set."""
    keys = dict.fromkeys(key for one in settings for key in one if key not in ("name", "seed"))
    found = {key: tuple(one.get(key) for one in settings) for key in keys}
    return {key: values for key, values in found.items() if len(set(values)) > 1}
