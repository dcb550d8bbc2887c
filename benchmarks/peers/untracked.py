"""``pipeline`` as ever, but without MLflow, to see what MLflow costs."""

from contextlib import nullcontext
from functools import partial

from pipeline import cli
from pipeline.commands import run
from pipeline.recording import mlflow

if __name__ == "__main__":
    run.recorded = partial(run.recorded, tracked=False)
    mlflow.head_start = lambda _: nullcontext()
    cli.main()
