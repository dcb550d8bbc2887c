"""Experiment in Python: from a file or a dict, checked, with overrides."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from pipeline.config.load import ExperimentFile, from_mapping, load
from pipeline.config.summary import to_yaml
from pipeline.recording.folder import shown

if TYPE_CHECKING:
    from pipeline.api.experiment_parts import Parts

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
            ExperimentError: something in it is wrong; carries every problem that was found.
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
            ExperimentError: one of them can't be built.
        """
        from pipeline.api.experiment_parts import Parts

        return Parts(self.file)

    @property
    def name(self) -> str:
        """Name of the experiment."""
        return self.file.experiment.name

    def to_yaml(self) -> str:
        """Return the experiment as YAML, with defaults, without credentials."""
        return to_yaml(shown(self.file.experiment))

    def __repr__(self) -> str:
        parallel = self.file.experiment.parallel
        how = f"{parallel.strategy} x {parallel.workers} with {parallel.launcher}"
        return f"Experiment({self.name}: {how})"
