"""Training on one rank: the loop, its step and what they stand on. Start at `pipeline.train.trainer`."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Return `Hook` or `State`, which need torch: commands that list checkpoints do without."""
    if name == "Hook":
        from pipeline.train.hooks import Hook

        return Hook
    if name == "State":
        from pipeline.train.state import State

        return State
    raise AttributeError(name)
