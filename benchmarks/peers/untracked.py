"""``pipeline`` as ever, but without MLflow, to see what MLflow costs."""

from functools import partial

from pipeline import cli, runner

if __name__ == "__main__":
    runner.recorded = partial(runner.recorded, tracked=False)
    cli.main()
