"""The commands from Python: ``from pipeline import Experiment, run, compare``, in scripts and notebooks."""

from pipeline.api.calls import compare, run
from pipeline.api.experiment import Experiment, Parts
from pipeline.api.result import ComparisonResult, Result, RunResult
from pipeline.api.trained import Trained

__all__ = ["ComparisonResult", "Experiment", "Parts", "Result", "RunResult", "Trained", "compare", "run"]
