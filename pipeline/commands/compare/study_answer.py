"""The answer of a study, from the trainings that are in its folder: also while it runs, and after its end."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from pipeline.commands.compare.compared_runs import Question, compare_variants
from pipeline.commands.compare.study_record import StudyRecord, find_differing
from pipeline.commands.compare.variants import SeededRun, Variant, read_training
from pipeline.commands.history.run_result import report_of
from pipeline.commands.sweep.assignment import folder_name
from pipeline.commands.sweep.journals import records, state_of
from pipeline.config.reported import PREFIX
from pipeline.recording.journal import journal
from pipeline.recording.journal.folder import id_of
from pipeline.recording.journal.run_summary import summarized
from pipeline.report.compared import Compared, ComparedPair, ComparedVariant
from pipeline.report.numbers.courses import Course, courses
from pipeline.report.numbers.time_to_target import TimeToTarget, find_target, seconds_until

_ENDED = ("finished", "failed")


def compare_study(folder: Path, *, hardware: str = "", question: Question | None = None) -> Compared:
    """Compare the variants of a study by the trainings that it has so far.

    Args:
        folder: the study's folder.
        hardware: the machine, in a line.
        question: what they are compared by; None: what the study was started with.

    Raises:
        UsageError: its record is damaged, or there is no such metric.
    """
    record = StudyRecord.read(folder)
    question = question or record.question
    runs: dict[str, dict[int, SeededRun]] = {name: {} for name in record.descriptions}
    left = record.looks[-1].pairs[0] * len(runs)
    for training in records(folder):
        place = folder / folder_name(training.number)
        left -= state_of(place)[0] in _ENDED
        if (found := summarized(place)) is not None:
            runs[training.variant][training.values["seed"]] = read_training(found)
    variants = [Variant(name, dict(sorted(found.items()))) for name, found in runs.items()]
    known = {
        "experiment": next(iter(record.settings.values())).get("name", ""),
        "hardware": hardware,
        "run": id_of(folder),
        "settings": find_differing([*record.settings.values()]),
        "left": max(0, left),
    }
    if not all(variant.runs for variant in variants):
        lists = [ComparedVariant(name=one.name, runs={}) for one in variants]
        others = tuple(ComparedPair(variant=one) for one in lists[1:])
        return Compared(first=lists[0], others=others, notes=record.notes, **known)
    if not any(one.metrics for variant in variants for one in variant.runs.values()):
        question = question.model_copy(update={"metric": None})  # which none has yet: a note says so, and is no error
    compared = compare_variants(variants, question, notes=record.notes, confidence=record.confidence)
    if record.is_alone:
        compared = _with_times(compared, variants, target=question.target, confidence=record.confidence)
    else:
        note = "The trainings ran side by side, so their times are not compared. To compare them, use --target"
        compared = compared.model_copy(update={"notes": (*compared.notes, note)})
    descriptions = record.descriptions
    others = tuple(one.model_copy(update={"variant": _describe(one.variant, descriptions)}) for one in compared.others)
    return compared.model_copy(
        update={
            **known,
            "first": _describe(compared.first, descriptions),
            "others": others,
            "notes": (*compared.notes, *_describe_looks(record, left=max(0, left))),
        }
    )


def _describe(variant: ComparedVariant, descriptions: Mapping[str, str]) -> ComparedVariant:
    return variant.model_copy(update={"description": descriptions[variant.name]})


def _describe_looks(record: StudyRecord, *, left: int) -> Iterator[str]:
    """Yield how the interval accounts for repeated looks; ``left``: trainings that have not ended."""
    looks = record.looks[-1].pairs
    if left:
        yield "The study is not complete. Resume it before you rely on the answer: an early look can deceive"
    if len(looks) > 1:
        yield (
            f"The answer was looked at after {', '.join(map(str, looks))} pairs at most. The interval is wider, so "
            "that it holds at 95% over all looks"
        )
    if len(record.looks) > 1:
        earlier = record.looks[-2].pairs[-1]
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
        time = TimeToTarget.of(seconds, metric=metric, target=target, confidence=level)
        prices, watts = zip(*(rates[name] for name in names), strict=True)
        others.append(one.model_copy(update={"time": time.model_copy(update={"prices": prices, "watts": watts})}))
    return compared.model_copy(update={"others": tuple(others)})


def _find_rates(variant: Variant, followed: Mapping[int, Course]) -> tuple[float | None, float | None]:
    """Return the price of an hour of a variant's devices, and their mean power in W; None if unknown."""
    for seed, course in followed.items():
        report, trained_s = report_of(variant.runs[seed].run), course.trained_s
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
