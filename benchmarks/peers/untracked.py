"""``pipeline`` as ever, but without MLflow, to see what MLflow costs."""

from contextlib import nullcontext
from typing import Any

from pipeline import cli
from pipeline.commands import invocation
from pipeline.tracking.mlflow import mlflow_subscriber

_recorded = invocation.recorded


def _untracked(*given: Any, **more: Any) -> Any:
    return _recorded(*given, **{**more, "tracked": False})


if __name__ == "__main__":
    invocation.recorded = _untracked
    mlflow_subscriber.head_start = lambda _: nullcontext()
    cli.main()
