"""Experiments with `pipeline.tasks.Lightning`: the module is the model, and brings its own optimizer and scheduler."""

from collections.abc import Mapping, Sequence
from typing import Any

TASK = "pipeline.tasks.Lightning"
OPTIMIZER = "pipeline.tasks.lightning.configured_optimizer"
SCHEDULER = "pipeline.tasks.lightning.configured_scheduler"
MODULE = "task.module"


def is_named(task: Any) -> bool:
    """Return True if an experiment's ``task``, None without one, is that of LightningModules."""
    return task is not None and task.target == TASK


def completed(values: Any) -> Any:
    """Return an experiment's values with ``task.module`` as the model and, unless it names one, the module's optimizer.

    Other values are returned as they are; what is wrong with them is found later.
    """
    task = values.get("task") if isinstance(values, Mapping) else None
    if not isinstance(task, Mapping) or task.get("_target_") != TASK:
        return values
    found = dict(values)
    if "module" in task and found.get("model") is None:
        found["model"] = task["module"]
        found["task"] = {name: value for name, value in task.items() if name != "module"}
    if found.get("optimizer") is None and not found.get("optimizers"):
        found["optimizer"] = {"_target_": OPTIMIZER, "total_steps": "${total_steps}"}
        if found.get("scheduler") is None:
            train = found.get("train")
            train = train if isinstance(train, Mapping) else {}
            metric = {"metric": train["scheduler_metric"]} if train.get("scheduler_metric") else {}
            found["scheduler"] = {"_target_": SCHEDULER, "interval": train.get("scheduler_interval", "step"), **metric}
    return found


def required(names: Sequence[str]) -> dict[str, Any]:
    """Return a JSON Schema that requires keys; with `pipeline.tasks.Lightning` not those that a module stands for."""
    own = [name for name in names if name in ("model", "optimizer")]
    task = {"properties": {"_target_": {"const": TASK}}, "required": ["_target_"]}
    brought = {"required": ["task"], "properties": {"task": task}}
    return {"required": [name for name in names if name not in own], "anyOf": [{"required": own}, brought]}


def as_written(key: str, entries: Mapping[str, Any]) -> str:
    """Return the key of a part of the model as the file has it: of ``task.module``, if that stands for the model."""
    is_moved = (key == "model" or key.startswith("model.")) and "model" not in entries and MODULE in entries
    return f"{MODULE}{key.removeprefix('model')}" if is_moved else key
