"""The commands from Python: ``from pipeline import Experiment, run, compare``, in scripts and notebooks."""

import warnings

from pipeline.api.calls import compare, run
from pipeline.api.experiment import Experiment, Parts
from pipeline.api.result import ComparisonResult, Result, RunResult
from pipeline.api.trained import Trained

# By tqdm, which libraries import, in a notebook without ipywidgets. The bars of pipeline need no widgets.
warnings.filterwarnings("ignore", message="IProgress not found")

__all__ = ["ComparisonResult", "Experiment", "Parts", "Result", "RunResult", "Trained", "compare", "run"]
