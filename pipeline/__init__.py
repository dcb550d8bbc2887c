"""Declarative experiments for data-parallel PyTorch training, with measured speedups.

`pipeline run experiments/resnet.yaml` is the whole story; start reading at `pipeline.commands.run`. From Python it is
``from pipeline import run``, see `pipeline.api`, which is imported when it is asked for: workers don't need it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.api import BenchmarkResult, Experiment, Parts, Result, RunResult, Trained, benchmark, run

__all__ = ["BenchmarkResult", "Experiment", "Parts", "Result", "RunResult", "Trained", "benchmark", "run"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pipeline import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
