"""Trained model of an earlier run, for predictions on new data."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from pipeline.api.experiment import Experiment
from pipeline.drive.execute import explain_problems
from pipeline.errors import UsageError
from pipeline.experiment.targets import allowed_packages
from pipeline.protocol.events import WEIGHTS
from pipeline.record import runs
from pipeline.record.folder import EXPERIMENT_NAME
from pipeline.system import importable
from pipeline.train.exported import trained_model
from pipeline.train.loader import to_device
from pipeline.train.reference import Reference


@dataclass(frozen=True)
class Trained:
    """Trained model with its run, created by `load`."""

    folder: Path
    """Folder of the run."""
    experiment: Experiment
    """Experiment of the run."""
    model: nn.Module
    """The model in evaluation mode, on the CPU, with the weights from the end of training."""

    @torch.no_grad()
    def predict(self, batch: Any) -> Any:
        """Return the model's outputs for a batch of inputs, without gradients, on the model's device.

        Args:
            batch: inputs without targets: a tensor with one sample per row, or a mapping from the names of the model's
                arguments to tensors.
        """
        device = next(self.model.parameters()).device
        is_double = self.experiment.file.experiment.train.precision == "fp64"
        inputs = to_device(batch, device=device, dtype=torch.float64 if is_double else None)
        return self.model(**inputs) if isinstance(inputs, Mapping) else self.model(inputs)

    @classmethod
    def load(cls, run: str | PathLike[str] = runs.LATEST, *, directory: str | PathLike[str] = "runs") -> "Trained":
        """Load the model of a run: "latest", a unique part of its id, or its folder.

        "latest" is the newest completed training without ``--quick``. If a newer training did not complete, a line on
        stderr names it.

        The model's class comes from the project's current code. MLflow is not needed.

        Raises:
            UsageError: the run does not exist, has no trained model, or its weights don't fit the current model.
            ExperimentError: the model can't be built, or computes other outputs than in the run's evaluation.
        """
        folder, note = runs.find_trained(str(run), Path(directory))
        if note:
            sys.stderr.write(f"note: {note}\n")
        weights = folder / WEIGHTS
        if not weights.is_file():
            raise UsageError(f"{folder}: has no {WEIGHTS}. Name a run whose training is complete.")
        experiment = Experiment.load(folder / EXPERIMENT_NAME)
        try:
            with explain_problems(experiment.file), importable(Path.cwd()):
                values = torch.load(weights, map_location="cpu", weights_only=True)
                model = trained_model(
                    experiment.file.experiment,
                    values,
                    allowed=allowed_packages(),
                    reference=Reference.load(folder),
                )
        except (OSError, RuntimeError, LookupError, EOFError, UnpicklingError) as error:
            cause = " ".join(str(error).split())[:300]
            raise UsageError(
                f"{weights}: cannot be loaded into {experiment.file.experiment.model.target}: {cause or 'damaged'}. "
                "Use the code of the training, or name another run."
            ) from error
        return cls(folder, experiment, model)
