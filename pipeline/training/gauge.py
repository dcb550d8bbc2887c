"""How busy a rank's GPUs are while it trains, as the driver's management library (NVML) counts it."""

from dataclasses import dataclass, field
from statistics import mean

import torch


@dataclass
class GpuGauge:
    """Reads the utilization of some GPUs now and then; without GPUs it reads nothing."""

    devices: list[int]
    """CUDA indices; empty on CPU."""
    _readings: list[list[float]] = field(default_factory=list)

    def read(self) -> None:
        """One reading: the share of the last fraction of a second in which a kernel ran."""
        if not self.devices:
            return
        try:
            self._readings.append([float(torch.cuda.utilization(device)) for device in self.devices])
        except (RuntimeError, ModuleNotFoundError):  # NVML's errors are RuntimeErrors; a MIG slice isn't counted
            self.devices = []

    def means(self) -> list[float]:
        """Mean percentage of each device; empty without a reading."""
        return [mean(column) for column in zip(*self._readings, strict=True)] if self.devices else []
