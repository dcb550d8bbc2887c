"""``pipeline`` as ever, but without MLflow, to see what MLflow costs."""

from contextlib import nullcontext
from functools import partial

from pipeline import cli, runner
from pipeline.recording import mlflow

if __name__ == "__main__":
    runner.recorded = partial(runner.recorded, tracked=False)
    mlflow.head_start = lambda _: nullcontext()
    cli.main()
