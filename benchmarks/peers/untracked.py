"""``pipeline`` as ever, but without MLflow, to see what MLflow costs."""

from typing import Any

from pipeline import cli
from pipeline.commands import invocation

_recorded = invocation.recorded


def _untracked(*given: Any, **more: Any) -> Any:
    return _recorded(*given, **{**more, "tracked": False})


if __name__ == "__main__":
    invocation.recorded = _untracked
    cli.main()
