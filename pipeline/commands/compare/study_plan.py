"""Plan of a study: its variants, the trainings of its pairs, and how many of them run at the same time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.commands.compare.compared_runs import Question
from pipeline.commands.compare.study_record import find_differing
from pipeline.commands.compare.variants import name_variant
from pipeline.commands.preparation import planning
from pipeline.commands.study_trials.assignment import Record
from pipeline.commands.study_trials.planning import describe_busy, find_concurrency, find_needs, shares_cluster
from pipeline.drive.directions import directions
from pipeline.errors import Problem, UsageError
from pipeline.experiment.load import ExperimentFile
from pipeline.experiment.reported import PREFIX, source_of
from pipeline.experiment.summary import flatten
from pipeline.experiment.values import Direction
from pipeline.plan.plan import Plan, make_plan
from pipeline.protocol.trial import Trial
from pipeline.wording import did_you_mean

_CPUS, _ADDRESS, _EXPERIMENT = "parallel.cpus_per_worker", "parallel.address", "tracking.experiment"
_TEST = "test/"
_LOSS: tuple[str, Direction] = (f"{PREFIX}loss", "min")
"""Metric that is followed if the variants have none in common, and its direction."""


@dataclass(frozen=True)
class StudyVariant:
    """A variant of a study."""

    name: str
    """A for the first one, and so on."""
    description: str
    """File, or the settings that differ."""
    settings: Mapping[str, str]
    """Settings as they were read, before this machine or cluster decided on cores."""
    file: ExperimentFile
    trial: Trial
    """Plan of a training of it."""


@dataclass(frozen=True)
class StudyPlan:
    """Plan of a study."""

    variants: tuple[StudyVariant, ...]
    question: Question
    metric: str
    """Validation metric that is shown while the trainings run."""
    direction: Direction
    """Direction in which it improves."""
    is_alone: bool
    """True if one training at a time has the machine to itself, so that times can be compared."""
    concurrent: int
    """Number of concurrent trainings."""
    plan: Plan
    """Plan for the run's folder and the tracking store."""

    @property
    def seed(self) -> int:
        """Seed of the first pair."""
        return self.variants[0].file.experiment.seed

    @property
    def shares_cluster(self) -> bool:
        """True if the trainings run on a cluster."""
        return any(shares_cluster(variant.file) for variant in self.variants)

    def trainings(self, pairs: int) -> list[Record]:
        """Return the trainings of so many pairs in the order in which they start: A B, B A, A B, ..."""
        found: list[Record] = []
        for pair in range(pairs):
            for variant in self.variants[:: -1 if pair % 2 else 1]:
                found.append(Record(number=len(found) + 1, values={"seed": self.seed + pair}, variant=variant.name))
        return found

    def needs(self, training: Record) -> dict[str, float]:
        """Return the resources of this machine that a training needs."""
        return find_needs(next(one.trial for one in self.variants if one.name == training.variant))

    @property
    def settings(self) -> dict[str, tuple[str | None, ...]]:
        """Settings in which the variants differ, each with its values."""
        return find_differing([variant.settings for variant in self.variants])


def make_study(
    variants: Sequence[tuple[str, ExperimentFile]], question: Question, *, pairs: int, is_timed: bool
) -> StudyPlan:
    """Check all variants, and plan their trainings.

    Args:
        variants: see `pipeline.experiment.variant_files.read_variants`.
        question: what they are compared by.
        pairs: number of pairs at first.
        is_timed: True if the trainings run one at a time in any case.

    Raises:
        UsageError: the variants have the same settings, or there is no such metric.
        ExperimentError: a file is wrong; ResourceError: the machine is too small.
    """
    files = [file for _, file in variants]
    settings = [flatten(file.experiment) for file in files]
    differing = find_differing(settings)
    if not differing:
        raise UsageError("the variants have the same settings. Give them at least one that differs.")
    is_alone = is_timed or any(key.startswith("parallel.") for key in differing)
    tracking = files[0].experiment.tracking
    if any(file.experiment.tracking.uri != tracking.uri for file in files):
        raise UsageError("the variants have different tracking.uri. Give all trainings of a study the same.")
    made, plans, concurrent = [], [], pairs * len(variants)
    metric, direction = _LOSS
    for number, (description, file) in enumerate(variants):
        with planning(file) as (allowed, resources):
            if file.experiment.parallel.is_elastic:
                message = f"is {list(file.experiment.parallel.worker_counts)}. A study compares one number."
                raise file.explain([Problem("parallel.workers", message)])
            common: dict[str, object] = {"seed": file.experiment.seed}
            if is_alone:
                concurrent = 1
            else:  # variants with the same workers, so with the same room for all
                concurrent, common[_CPUS] = find_concurrency(file, resources, allowed=allowed, total=concurrent)
            parallel = file.experiment.parallel
            if parallel.launcher == "ray" and parallel.cluster is not None:
                common[_ADDRESS] = parallel.cluster  # RAY_ADDRESS may be where it stands
            common[_EXPERIMENT] = tracking.experiment or files[0].experiment.name  # all below the study's run
            varied = file.vary(common)
            found = _find_metric(file, question, allowed=allowed)
            metric, direction = found if number == 0 or found == (metric, direction) else _LOSS
            plan = make_plan(varied.experiment, resources, allowed=allowed, with_baseline=False)
        made.append(StudyVariant(name_variant(number), description, settings[number], varied, plan.main))
        plans.append((plan, describe_busy(resources, concurrent=concurrent)))
    plan, busy = plans[0]
    notes = [note for each, _ in plans for note in each.notes]
    if len({file.experiment.seed for file in files}) > 1:
        notes.append(f"The variants have different seeds. All pairs start at {files[0].experiment.seed}.")
    if len({file.experiment.checkpoint.best for file in files}) > 1:
        notes.append("checkpoint.best differs: values at the best step are compared with values at another step.")
    return StudyPlan(
        variants=tuple(made),
        question=question,
        metric=metric,
        direction=direction,
        is_alone=is_alone,
        concurrent=concurrent,
        plan=plan.model_copy(
            update={
                "command": "study",
                "experiment": files[0].experiment,
                "notes": (*dict.fromkeys(notes), *(busy if not is_alone else ())),
            }
        ),
    )


def _find_metric(file: ExperimentFile, question: Question, *, allowed: tuple[str, ...]) -> tuple[str, Direction]:
    """Return the validation metric that is shown while the trainings run, and the direction in which it improves.

    Raises:
        UsageError: there is no such metric, or its direction is unknown.
    """
    experiment = file.experiment
    known = [*experiment.metrics, "loss"]
    name = question.metric or experiment.checkpoint.best or "loss"  # another metric may have a value per class
    name = name.removeprefix(_TEST).removeprefix(PREFIX)
    if name != "loss" and source_of(f"{PREFIX}{name}", experiment.metrics) is None:
        hint = did_you_mean(name, known) or f"; {file.path} has {', '.join(known)}"
        raise UsageError(f"--metric {name}: there is no such metric{hint}")
    metric = f"{PREFIX}{name}"
    direction = question.mode or directions(experiment, allowed=allowed).get(metric)
    if direction is None:
        raise UsageError(f"it is unknown whether {metric} is better if it is higher or lower. Set --mode min or max.")
    return metric, direction


def describe_study(study: StudyPlan, *, looks: Sequence[int]) -> str:
    """Describe a plan in lines."""
    kinds = "one at a time, in turn" if study.is_alone else f"{study.concurrent} at a time"
    trainings = study.trainings(looks[-1])
    lines = [
        *(f"{variant.name}            {variant.description}" for variant in study.variants),
        *(f"             {key}: {', '.join(str(value) for value in values)}" for key, values in study.settings.items()),
        f"compared by  {_name_metric(study)}",
        f"pairs        {looks[-1]}, seeds {study.seed} to {study.seed + looks[-1] - 1}",
        *([f"looks        after {', '.join(map(str, looks))} pairs, until the answer is clear"] if looks[1:] else []),
        f"machine      {study.plan.resources.summary}",
        f"concurrent   {kinds}, each with {study.variants[0].trial.launcher}",
        f"tracking     {study.plan.experiment.tracking.uri}",
        *(f"  {training.title}" for training in trainings),
    ]
    return "\n".join(lines)


def _name_metric(study: StudyPlan) -> str:
    """Name the metric that the answer is about, as far as it is known before the trainings have their metrics."""
    experiment = study.plan.experiment
    return study.question.metric or experiment.checkpoint.best or f"{PREFIX}{next(iter(experiment.metrics), 'loss')}"
