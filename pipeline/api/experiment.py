"""Experiment in Python: from a file or a dict, checked, with overrides; and its parts, for tests and notebooks."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeline.drive.checkpoints import find_initial
from pipeline.drive.execute import explain_problems
from pipeline.errors import ExperimentError, UsageError
from pipeline.experiment import references
from pipeline.experiment.load import ExperimentFile, from_mapping, load
from pipeline.experiment.summary import to_yaml
from pipeline.experiment.targets import allowed_packages
from pipeline.experiment.values import Component
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Training
from pipeline.system import importable
from pipeline.tasks import Loss
from pipeline.train.build import build
from pipeline.train.evaluate import forward
from pipeline.train.seeds import keep_generators
from pipeline.wording import format_parallel

Source = str | PathLike[str] | Mapping[str, Any]


@dataclass(frozen=True)
class Experiment:
    """Checked experiment, made by `load`."""

    source: Source
    """File or dict that it was loaded from."""
    overrides: tuple[str, ...]
    file: ExperimentFile
    """Checked source; ``file.experiment`` has its sections."""

    @classmethod
    def load(cls, source: "Source | Experiment", *overrides: str) -> "Experiment":
        """Load an experiment from a file, or from a dict with a file's content; ``overrides`` are ``key=value``.

        Raises:
            UsageError: the file can't be read, or an override is malformed.
            ExperimentError: the experiment is wrong; contains every problem that was found.
        """
        if isinstance(source, Experiment):
            return cls.load(source.source, *source.overrides, *overrides) if overrides else source
        if isinstance(source, Mapping):
            file = from_mapping(source, overrides)
            return cls(deepcopy(source), overrides, file)
        return cls(source, overrides, load(str(source), overrides))

    def build(self) -> "Parts":
        """Build its model, data, loss and metrics in this process, for tests and notebooks.

        Raises:
            ExperimentError: a component can't be built.
        """
        return Parts(self.file)

    @property
    def name(self) -> str:
        """Name of the experiment."""
        return self.file.experiment.name

    def arguments(self, section: str) -> Mapping[str, Any]:
        """Return the arguments of a component, with values of the environment, by its section, such as "data".

        Raises:
            ExperimentError: an environment variable is not set.
            UsageError: the section does not exist, or is not a component.
        """
        component = getattr(references.fill_in(self.file.experiment), section, None)
        if not isinstance(component, Component):
            raise UsageError(f"{section}: {self.name} has no component with this name. Use model or data.")
        if unset := references.find_unset_variables(str(component.arguments)):
            raise ExperimentError.of(section, references.explain_unset(unset[0]))
        return component.arguments

    def to_yaml(self) -> str:
        """Return the experiment as YAML, with defaults, without credentials."""
        return to_yaml(self.file.experiment)

    def __repr__(self) -> str:
        parallel = self.file.experiment.parallel
        how = format_parallel(parallel.strategy, parallel.workers)
        return f"Experiment({self.name}: {how}, {parallel.launcher})"


class Parts:
    """Model, data, loss and metrics, built on the CPU as in a worker; created by ``Experiment.build()``."""

    def __init__(self, file: ExperimentFile) -> None:
        """Build the parts.

        Raises:
            ExperimentError: a component can't be built; contains all problems with their lines.
        """
        from torchmetrics import MetricCollection

        with explain_problems(file), importable(Path.cwd()), keep_generators():
            trial = Training(
                name="main",
                experiment=file.experiment,
                strategy="single",
                launcher="inprocess",
                workers=1,
                devices_per_worker=0,
                device="cpu",
                cpus_per_worker=torch.get_num_threads(),
                allowed=allowed_packages(),
                initial=find_initial(file.experiment),
            )
            self._state = build(trial, rank=Rank())
            self._state.trainee.keeps_outputs = True
            self.metrics = self._state.metrics or MetricCollection({})
            """Validation metrics by name; each takes outputs and targets of a step."""

    @property
    def model(self) -> nn.Module:
        """The model, in training mode, in the precision of ``train.precision``."""
        return self._state.model

    @property
    def train_samples(self) -> int:
        """Size of the training set."""
        return self._state.order.set_size

    @property
    def validation_samples(self) -> int:
        """Size of the validation set; 0 if there is none."""
        return self._state.batches.size("validation")

    def batch(self, samples: Iterable[int], *, validation: bool = False) -> Any:
        """Return samples of the training or validation set as one batch, in the form that the model receives.

        Raises:
            TrainingError: a sample can't be read.
            ExperimentError: the samples can't be collated, or the data has no validation set.
        """
        batches = self._state.batches
        return batches.place(batches.read(list(samples), "validation" if validation else None))

    def step(self, batch: Any) -> Loss:
        """Compute loss, outputs and targets of the model on a batch, with the experiment's loss or task.

        The loss is a sum over the items of the batch: divide ``sum`` by ``count``, or by the number of samples if that
        is None. With several optimizers, it is the sum of the optimizers' losses, and the logs contain each of these.
        """
        return forward(self._state, batch)
