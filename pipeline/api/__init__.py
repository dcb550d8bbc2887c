"""The commands from Python: ``from pipeline import Experiment, run, benchmark``, in scripts and notebooks."""

import warnings

from pipeline.api.calls import benchmark, run
from pipeline.api.experiment import Experiment, Parts
from pipeline.api.result import BenchmarkResult, Result, RunResult
from pipeline.api.trained import Trained

# By tqdm, which libraries import, in a notebook without ipywidgets. The bars of pipeline need no widgets.
warnings.filterwarnings("ignore", message="IProgress not found")

__all__ = ["BenchmarkResult", "Experiment", "Parts", "Result", "RunResult", "Trained", "benchmark", "run"]
