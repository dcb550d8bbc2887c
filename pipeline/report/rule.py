"""What the rules of advice work on and what they say."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from pipeline.config.schema import Experiment
from pipeline.config.train import Train
from pipeline.config.values import Frozen
from pipeline.report import Advice, Row


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row to give advice on."""

    row: Row
    experiment: Experiment
    cores: int | None
    """Of each node; None if unknown."""

    @property
    def workers_per_node(self) -> int:
        """Workers on the fullest node."""
        nodes = self.row.parts.nodes
        return max(nodes.count(node) for node in nodes)

    @property
    def cores_per_worker(self) -> int:
        """Cores that each worker has."""
        return self.row.cpus // self.row.workers

    def is_clear(self, ms: float) -> bool:
        """Whether a part of a step, the median of several rounds, is longer than the noise of the step.

        One round in which the machine did something else says nothing about a part that is most of the step.
        """
        return ms > min(self.row.noise_ms, self.row.step_ms.median / 2)


class Finding(Frozen):
    """Something that costs time, and what to do about it."""

    reason: str
    """What was measured, in words."""
    values: Mapping[str, Any] = {}
    """What to write in the experiment file: dotted keys and their values."""
    change: str = ""
    """What to do besides, or instead, in words."""
    is_measured: bool = False
    """Whether this run has measured that what it says to write is faster, beyond the noise. Otherwise it is a question:
    cores that are shared, caches and links may make of any formula the opposite."""
    gain: float = 0.0
    """About the fraction of a step that it saves; findings are ordered by it."""

    @property
    def advice(self) -> Advice:
        """The finding in words."""
        values = written(self.values)
        write = f"write {values}" if self.is_measured else f"try {values}; not measured"
        return Advice(
            reason=self.reason,
            change="; ".join(filter(None, [write if self.values else "", self.change])),
            key=next(iter(self.values), ""),
            measured=self.is_measured,
        )


def written(values: Mapping[str, Any]) -> str:
    """Keys and values as in a file, e.g. "train.global_batch_size: 128, loader.num_workers: 2"."""
    return ", ".join(f"{key}: {_flow(value)}" for key, value in values.items())


def scaled_rate(experiment: Experiment, *, base: int) -> dict[str, Any]:
    """What to write so that the learning rate, chosen for global batches of ``base``, follows; empty if it does.

    Linear for SGD (Goyal et al. 2017, arXiv 1706.02677), the square root for Adam and its kin (Malladi et al. 2022,
    arXiv 2205.10287).
    """
    train: Train = experiment.train
    if train.lr_scaling.rule != "none":
        return {}
    rule = "sqrt" if "adam" in experiment.optimizer.target.lower() else "linear"
    return {"train.lr_scaling": {"rule": rule, "base_batch_size": base}}


def _flow(value: Any) -> str:
    """A value of YAML on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=float("inf"))
    return text.removesuffix("\n").removesuffix("\n...")
