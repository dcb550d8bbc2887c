"""``pipeline evaluate``: loss and metrics of a checkpoint on a held-out set, added to the run and to MLflow."""

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pipeline.commands.invocation import find_places, invoked, planning, refuse_outer_launcher
from pipeline.commands.options import (
    RUNS,
    AllowChangedData,
    CheckpointOption,
    Directory,
    Json,
    Overrides,
    Quiet,
    RunArgument,
    Verbose,
    find_trained,
    head_start,
    opened,
    print_json,
)
from pipeline.commands.show import summarize
from pipeline.drive import resume
from pipeline.drive.checkpoints import check_ended_training, choose
from pipeline.experiment.load import ExperimentFile
from pipeline.experiment.reported import group_by_metric, single_names
from pipeline.experiment.schema import Configuration
from pipeline.plan.plan import Plan, Planner
from pipeline.protocol.events import Evaluated
from pipeline.protocol.trial import Evaluation, Split
from pipeline.record import provenance
from pipeline.record.folder import RunState, id_of, read_state
from pipeline.results.record import Fact, Result, Table, format_fact
from pipeline.results.terminal import print_result
from pipeline.wording import counted, format_parallel

_CELL = re.compile(r"(.*)_true_(\d+)_predicted_(\d+)\Z")
_CLASS = re.compile(r"(.*)_(\d+)\Z")
_MOST_CLASSES = 10  # Classes of the largest table that a screen has room for


class SplitName(StrEnum):
    """Dataset split."""

    test = "test"
    validation = "validation"


def evaluate(
    run: RunArgument,
    overrides: Overrides = None,
    *,
    checkpoint: CheckpointOption = None,
    split: Annotated[
        SplitName | None,
        typer.Option(
            "--split",
            show_default=False,
            help="Dataset split to evaluate. Default: test if available, otherwise validation.",
        ),
    ] = None,
    allow_changed: AllowChangedData = False,
    directory: Directory = RUNS,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Evaluate a checkpoint of an ended run: loss and metrics on the test set, with any number of workers.

    The journal and the MLflow run of the training get the values; its result stays the training's.
    """
    folder = find_trained(run, directory)
    with (
        opened(folder / "experiment.yaml", overrides or (), as_json=as_json, quiet=quiet) as (file, terminal),
        head_start(file, verbose=verbose),
    ):
        refuse_outer_launcher("evaluate")
        state = read_state(folder)
        check_ended_training(state, command="evaluate")
        wanted: Split | None = split.value if split else None
        plan = make(file, state=state, checkpoint=checkpoint, split=wanted, allow_changed=allow_changed)
        with invoked(plan, file=file, terminal=terminal, verbose=verbose, folder=folder, adds=True) as invocation:
            (outcome,) = invocation.execute(plan.trials)
        assert outcome.evaluated is not None  # the trial has ended well
        result = make_result(outcome.evaluated, plan, folder=folder, has_choice=split is not None)
        if as_json:
            print_json(result.model_dump_json(indent=1))
        else:
            print_result(result, terminal=terminal, is_verbose=verbose)


def make(
    file: ExperimentFile,
    *,
    state: RunState,
    checkpoint: str | None,
    split: Split | None,
    allow_changed: bool = False,
) -> Plan:
    """Check the file, choose the checkpoint and plan the one trial; for the errors see `planning` and `choose`.

    An override that changes what is evaluated allows other data, too: the result names both.
    """
    changes, parallel = resume.altered(file, state), file.experiment.parallel
    with planning(file, resumes=True) as (allowed, resources):
        chosen = choose(file, folder=state.folder, wanted=checkpoint, allowed=allowed)
        planner = Planner(file.experiment, resources, allowed)
        own = Configuration(strategy=parallel.strategy, workers=planner.workers, options=parallel.options)
        trial = planner.trial(
            Evaluation,
            own,
            checkpoints=chosen.address,
            step=chosen.manifest.step,
            best=chosen.best,
            split=split,
            changes=tuple(changes),
            note=chosen.note,
            allow_changed=allow_changed or bool(changes),
        )
    return Plan(command="evaluate", experiment=file.experiment, resources=resources, trials=(trial,))


def make_result(found: Evaluated, plan: Plan, *, folder: Path, has_choice: bool) -> Result:
    """Return the result of an evaluation; ``has_choice`` is True if the command named the set."""
    trial, name = plan.main, plan.experiment.name
    assert isinstance(trial, Evaluation)
    how = format_parallel(trial.strategy, trial.workers)
    samples = counted(found.samples, "sample", spec=",")
    facts = {key: Fact(key=key, value=value) for key, value in found.values.items()}
    ordered = sorted(single_names(found.values), key=lambda key: key.endswith("/loss"))
    answer = [", ".join(f"{key} {format_fact(facts[key])}" for key in ordered)] if ordered else []
    notes = [f"{trial.note[0].upper()}{trial.note[1:]}"] if trial.note else []
    if found.split == "validation" and not has_choice:
        notes.append("The data has no test set, so this is the validation set.")
    notes += [f"Not the experiment that was trained: {change}." for change in found.changes]
    tables = list(_iter_tables(facts))
    shown = {table.title for table in tables}
    hidden = {metric: names for metric, names in group_by_metric(found.values).items() if len(names) > 1}
    notes += [
        f"{metric} has {len(names)} values: see pipeline evaluate --json."
        for metric, names in hidden.items()
        if metric not in shown
    ]
    counts = {"step": found.step, "epoch": found.epoch, "samples": found.samples, "workers": trial.workers}
    return Result(
        kind="evaluate",
        name=name,
        run=id_of(folder),
        title=f"{name}: evaluation completed ({found.split} set, {samples}; {how})",
        hardware=provenance.hardware(plan),
        headline=(*answer, f"{found.weights[0].upper()}{found.weights[1:]}"),
        verdict=f"{summarize(found)}{f'; {trial.note}' if trial.note else ''}",
        facts=(*facts.values(), *(Fact(key=key, value=value) for key, value in counts.items())),
        tables=tuple(tables),
        notes=tuple(notes),
        places=find_places(folder),
    )


def _iter_tables(facts: Mapping[str, Fact]) -> Iterator[Table]:
    """Yield the metrics of many values as tables, if they are not of too many classes."""
    for metric, names in group_by_metric(facts).items():
        cells = {(found[2], found[3]): facts[name] for name in names if (found := _CELL.match(name))}
        classes = {found[2]: facts[name] for name in names if (found := _CLASS.match(name))}
        if len(names) == 1 or max(len({true for true, _ in cells}), len(classes) if not cells else 0) > _MOST_CLASSES:
            continue
        if cells:
            ordered = sorted({true for true, _ in cells}, key=int)
            rows = tuple((true, *(cells[true, other] for other in ordered)) for true in ordered)
            yield Table(title=metric, header=(f"{metric}: true \\ predicted", *ordered), rows=rows)
        elif classes:
            yield Table(title=metric, header=(f"{metric}: class", *classes), rows=(("", *classes.values()),))
