"""The answer of a study, from the trainings that are in its folder: also while it runs, and after its end."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipeline.commands.compare.compared_runs import Question, compare_variants, list_runs
from pipeline.commands.compare.study_record import StudyRecord, find_differing
from pipeline.commands.compare.variants import SeededRun, Variant, read_training
from pipeline.commands.history.run_result import report_of
from pipeline.commands.study_trials.assignment import folder_name
from pipeline.commands.study_trials.journals import has_begun, records, state_of
from pipeline.errors import UsageError
from pipeline.experiment.reported import PREFIX
from pipeline.record import journal
from pipeline.record.folder import id_of
from pipeline.record.run_summary import summarized
from pipeline.report.compared import Compared, ComparedPair, ComparedVariant
from pipeline.report.numbers.courses import Course, courses
from pipeline.report.numbers.time_to_target import TimeToTarget, find_target, seconds_until

_ENDED = ("finished", "failed")


def compare_study(folder: Path, *, hardware: str = "", changes: Mapping[str, Any] = MappingProxyType({})) -> Compared:
    """Compare the variants of a study, by the pairs of the last look at which it has arrived.

    Before the first look there is no answer: one that is looked at early can deceive.

    Args:
        folder: the study's folder.
        hardware: the machine, in a line.
        changes: what they are compared by instead of what the study was started with, by field of a `Question`.

    Raises:
        UsageError: its record is damaged.
    """
    record = StudyRecord.read(folder)
    trainings = list(records(folder))
    names = [*record.descriptions]
    ended = {one.number for one in trainings if state_of(folder / folder_name(one.number))[0] in _ENDED}
    pairs = next(number for number in count() if not _is_whole(number + 1, ended, size=len(names)))
    look = record.last_look(pairs)
    runs: dict[str, dict[int, SeededRun]] = {name: {} for name in names}
    notes = list(record.notes)
    for training in trainings if look is None else trainings[: look * len(names)]:
        place = folder / folder_name(training.number)
        if has_begun(place) and (found := summarized(place)) is not None:
            runs[training.variant][training.values["seed"]] = read_training(found)
        elif training.number in ended:
            notes.append(f"{training.title} does not count: {state_of(place)[1] or 'it did not start'}")
    variants = [Variant(name, dict(sorted(found.items()))) for name, found in runs.items()]
    known = {
        "experiment": next(iter(record.settings.values())).get("name", ""),
        "hardware": hardware,
        "run": id_of(folder),
        "settings": find_differing([*record.settings.values()]),
        "left": max(0, record.looks[-1].pairs[0] * len(names) - len(ended)),
    }
    lists = [_describe(list_runs(one), record.descriptions) for one in variants]
    nothing = Compared(first=lists[0], others=tuple(ComparedPair(variant=one) for one in lists[1:]), notes=(), **known)
    if look is None:
        note = f"{pairs} of {record.looks[-1].pairs[0]} pairs are complete. The answer comes after all of them"
        return nothing.model_copy(update={"notes": (*notes, note)})
    if not all(variant.runs for variant in variants):
        return nothing.model_copy(update={"notes": tuple(notes)})
    compared = _compare(variants, record, record.question.model_copy(update=changes), notes=notes)
    others = tuple(
        one.model_copy(update={"variant": _describe(one.variant, record.descriptions)}) for one in compared.others
    )
    first, notes = _describe(compared.first, record.descriptions), [*compared.notes, *_describe_looks(record)]
    return compared.model_copy(update={**known, "first": first, "others": others, "notes": tuple(notes)})


def _is_whole(pairs: int, ended: Collection[int], *, size: int) -> bool:
    """Return True if all trainings of so many pairs have ended."""
    return all(number in ended for number in range(1, pairs * size + 1))


def _compare(variants: Sequence[Variant], record: StudyRecord, question: Question, *, notes: Sequence[str]) -> Compared:
    """Compare the variants; a metric that they don't have is named in a note, since they are trained already."""
    levels = {"confidence": record.confidence, "next_confidence": record.next_confidence}
    try:
        compared = compare_variants(variants, question, notes=notes, **levels)
    except UsageError as error:
        other = question.model_copy(update={"metric": None})
        compared = compare_variants(variants, other, notes=[*notes, str(error)], **levels)
    commits = {
        opened.tags.get("git_commit", "") for one in variants for run in one.runs.values() for opened in [run.opened]
    }
    if len(commits) > 1:
        note = (
            f"The trainings ran with different code: commits {', '.join(sorted(one[:12] or 'none' for one in commits))}"
        )
        compared = compared.model_copy(update={"notes": (*compared.notes, note)})
    if record.is_alone:
        return _with_times(compared, variants, target=question.target, confidence=record.confidence)
    note = "The trainings ran side by side, so their times are not compared. A new study with --target compares them"
    return compared.model_copy(update={"notes": (*compared.notes, note)})


def _describe(variant: ComparedVariant, descriptions: Mapping[str, str]) -> ComparedVariant:
    return variant.model_copy(update={"description": descriptions[variant.name]})


def _describe_looks(record: StudyRecord) -> Iterator[str]:
    """Yield how the interval accounts for repeated looks."""
    looks = record.looks[-1].pairs
    if len(looks) > 1:
        yield (
            f"The answer was looked at after {', '.join(map(str, looks))} pairs at most. The interval is wider, so "
            "that it holds at 95% over all looks"
        )
    if len(record.looks) > 1:
        earlier = record.looks[-2].answered_at
        yield f"The study was extended after an answer from {earlier} pairs, so its interval is wider"


def _with_times(
    compared: Compared, variants: Sequence[Variant], *, target: float | None, confidence: float
) -> Compared:
    """Add the time to target of each pair. The intervals of several variants hold together (Bonferroni)."""
    level = 1 - (1 - confidence) / len(compared.others)
    if (answer := next((one.answer for one in compared.others if one.answer is not None), None)) is None:
        return compared
    metric, direction = answer.metric.replace("test/", PREFIX, 1), answer.direction
    followed = {one.name: {seed: _follow(run) for seed, run in one.runs.items() if run.metrics} for one in variants}
    if target is None:
        all_courses = (course for courses_ in followed.values() for course in courses_.values())
        target = find_target(all_courses, metric=metric, direction=direction)
    if target is None:
        return compared
    rates = {one.name: _find_rates(one, followed[one.name]) for one in variants}
    others = []
    for one in compared.others:
        names = compared.first.name, one.variant.name
        until = partial(seconds_until, metric=metric, target=target, direction=direction)
        both = followed[names[0]], followed[names[1]]
        seconds = {
            seed: (until(both[0][seed]), until(both[1][seed])) for seed in sorted(both[0].keys() & both[1].keys())
        }
        time = TimeToTarget.compare(seconds, metric=metric, target=target, confidence=level)
        prices, watts = zip(*(rates[name] for name in names), strict=True)
        others.append(one.model_copy(update={"time": time.model_copy(update={"prices": prices, "watts": watts})}))
    return compared.model_copy(update={"others": tuple(others)})


def _find_rates(variant: Variant, followed: Mapping[int, Course]) -> tuple[float | None, float | None]:
    """Return the price of an hour of a variant's devices, and their mean power in W; None if unknown."""
    for seed, course in followed.items():
        report, trained_s = report_of(variant.runs[seed].run), course.measure_training()
        if report is None or not trained_s:
            continue
        price, energy = report.price_per_device_hour, report.main.energy
        return (
            price * report.main.device_count if price is not None else None,
            energy.joules / trained_s if energy is not None else None,
        )
    return None, None


def _follow(run: SeededRun) -> Course:
    """Return the course of a training; of one that was never evaluated, an empty one."""
    found = courses(journal.read(run.run.folder / journal.FILE_NAME))
    return next((course for course in found if course.trial == "main"), Course(title=""))
