"""Commands that use the weights of a training: evaluate, export."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from pipeline.cli.arguments import Json, Overrides, Quiet, Verbose, head_start, opened, print_json
from pipeline.cli.results import Directory, RunArgument, find_trained
from pipeline.system import begin_stage, end_stage

CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="best|last|STEP",
        show_default=False,
        help="Checkpoint to use. Default: best if the experiment sets checkpoint.best, otherwise last.",
    ),
]


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
    directory: Directory = Path("runs"),
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Evaluate a checkpoint of a completed run: loss and metrics on the test set, with any number of workers."""
    folder = find_trained(run, directory)
    with (
        opened(folder / "experiment.yaml", overrides or (), as_json=as_json, quiet=quiet) as (experiment, terminal),
        head_start(experiment, verbose=verbose),
    ):
        from pipeline.commands.evaluate import evaluate

        evaluate(
            experiment,
            folder=folder,
            checkpoint=checkpoint,
            split=split.value if split is not None else None,
            verbose=verbose,
            terminal=terminal,
            show=lambda report: print_json(report.model_dump_json(indent=2)) if as_json else None,
        )


def export(
    run: RunArgument,
    *,
    to: Annotated[
        Path, typer.Option("--to", metavar="FOLDER", show_default=False, help="Folder for the files; must be empty.")
    ],
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Also write the model in ONNX. Needs the packages onnx and onnxscript.")
    ] = False,
    checkpoint: CheckpointOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write into a folder that is not empty, and replace an earlier export.")
    ] = False,
    directory: Directory = Path("runs"),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Export the trained model of a run: its weights, and a program that runs without the model's code."""
    from pipeline.commands import export as exporting
    from pipeline.commands.exported_files import README
    from pipeline.record.screen import write

    folder = find_trained(run, directory)
    exporting.check_options(onnx=onnx, to=to, force=force)
    with opened(folder / "experiment.yaml", as_json=as_json, quiet=quiet) as (experiment, terminal):
        begin_stage("importing torch")
        exported = exporting.export(experiment, folder=folder, to=to, checkpoint=checkpoint, onnx=onnx)
        end_stage()
    if as_json:
        typer.echo(exported.model_dump_json(indent=2))
        return
    write(terminal.progress, f"{exported.model['_target_']} of run {exported.run}")
    write(terminal.progress, str(exported.weights))
    for path in sorted(to.iterdir()):
        terminal.progress.print(f"  {path.name:<20} {decimal(path.stat().st_size)}", markup=False, soft_wrap=True)
    if exported.no_program:
        write(terminal.warnings, f"note: no program was written: {exported.no_program}")
    write(terminal.result, f"To load it, see {to / README}")
