"""Distribution of blocks of rows to the ranks. An actor of Ray loads this file, so it imports little."""

from typing import TYPE_CHECKING, Any

from ray.train import DataConfig

if TYPE_CHECKING:
    from ray.data import DataIterator, Dataset


class Dealing(DataConfig):  # type: ignore[misc]
    """Ray's `DataConfig` with an option that it lacks: blocks are distributed in order."""

    def __init__(self, *, keeps_order: bool) -> None:
        super().__init__()
        self._keeps_order = keeps_order

    def configure(
        self, datasets: dict[str, "Dataset"], world_size: int, worker_handles: Any, worker_node_ids: Any, **_: Any
    ) -> list[dict[str, "DataIterator"]]:
        """Return each worker's part of each dataset, by rank."""
        parts: list[dict[str, DataIterator]] = [{} for _ in range(world_size)]
        for name, dataset in datasets.items():
            copy = dataset.copy(dataset)
            keeps_order = self._keeps_order or name == "validation"  # where each row must count once
            copy.context.execution_options.preserve_order = keeps_order
            hints = None if keeps_order else worker_node_ids
            splits = copy.streaming_split(world_size, equal=not keeps_order, locality_hints=hints)
            for part, split in zip(parts, splits, strict=True):
                part[name] = split
        return parts
