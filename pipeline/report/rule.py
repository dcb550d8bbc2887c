"""Input and output of the rules that give advice: a `Case` and a `Finding`."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.config.overrides import override
from pipeline.config.schema import Experiment
from pipeline.config.train import Train
from pipeline.config.values import Frozen
from pipeline.report import Advice, Row
from pipeline.report.breakdown import has_consistent_parts


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row to give advice on."""

    row: Row
    experiment: Experiment
    cores: int | None
    """Cores of each node; None if unknown."""

    @property
    def workers_per_node(self) -> int:
        """Workers on the node with most workers."""
        nodes = self.row.parts.nodes
        return max(nodes.count(node) for node in nodes)

    @property
    def cores_per_worker(self) -> int:
        """Cores that each worker has."""
        return self.row.cpus // self.row.workers

    @property
    def has_parts(self) -> bool:
        """True if the parts of a step may be used: they were measured, and agree with the step."""
        return has_consistent_parts(self.row)

    def is_clear(self, ms: float) -> bool:
        """Return True if a part of a step, a median of several rounds, is longer than the noise of the step.

        The noise counts up to half the step: one disturbed round is no reason to doubt a part that dominates the step.
        """
        return ms > min(self.row.noise_ms, self.row.step_ms.median / 2)


class Finding(Frozen):
    """Something that costs time, with a change that saves it."""

    reason: str
    """Sentence about the measurement behind the finding."""
    values: Mapping[str, Any] = {}
    """New values in the experiment file, by dotted key."""
    change: str = ""
    """Action to take in addition to ``values`` or instead, in words."""
    is_measured: bool = False
    """True if this run measured ``values``.

    Otherwise they are a suggestion to try: shared cores, caches and links may defeat any formula.
    """
    use: str = ""
    """See `Advice`, also for the next field."""
    why: str = ""
    gain: float = 0.0
    """Estimated fraction of a step that the change saves; findings are ordered by it."""

    @property
    def advice(self) -> Advice:
        """Finding in words."""
        overrides = pasted(self.values)
        change = f"{'set' if self.is_measured else 'try'} {overrides}" if overrides else ""
        return Advice(
            reason=self.reason,
            change="; ".join(filter(None, [self.change, change])),
            key=next(iter(self.values), ""),
            overrides=overrides,
            measured=self.is_measured,
            use=self.use,
            why=self.why,
        )


def pasted(values: Mapping[str, Any]) -> str:
    """Format keys and values for a shell, e.g. "train.global_batch_size=128 loader.num_workers=2"."""
    return shlex.join(override(key, value) for key, value in values.items())


def scaled_rate(experiment: Experiment, *, base: int) -> dict[str, Any]:
    """Return the keys that scale a learning rate chosen for global batches of ``base``; empty if the file scales it.

    The rule is linear for SGD (Goyal et al. 2017, arXiv 1706.02677) and the square root for Adam and its kin (Malladi
    et al. 2022, arXiv 2205.10287).
    """
    train: Train = experiment.train
    if train.lr_scaling.rule != "none":
        return {}
    optimizer = experiment.optimizer
    if optimizer is None:  # of several, each may follow another rule
        return {}
    rule = "sqrt" if "adam" in optimizer.target.lower() else "linear"
    return {"train.lr_scaling.rule": rule, "train.lr_scaling.base_batch_size": base}
