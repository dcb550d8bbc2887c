"""Where the results of a run ended up, in figures and in words."""

from pathlib import Path

from pydantic import ValidationError

from pipeline.config.values import Frozen
from pipeline.recording.delivery import Delivery
from pipeline.recording.journal import FILE_NAME

_FILE_NAME = "tracking.json"


class TrackingOutcome(Frozen):
    """Where the results of a run ended up."""

    experiment_id: str = ""
    """MLflow's id of the experiment; empty if MLflow never answered."""
    run_id: str = ""
    """MLflow's id of the main run; empty if MLflow never answered."""
    delivered: bool
    """Whether everything is in MLflow that it will ever take."""
    uri: str = ""
    """Of the store, without credentials, if results were sent to another one than the run's own."""
    message: str = ""
    """What is missing and the command that sends it. Empty if nothing is, or after a sync where to see it."""

    def keep(self, folder: Path) -> None:
        """Write it into the run's folder, for `kept`."""
        (folder / _FILE_NAME).write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    @classmethod
    def kept(cls, folder: Path) -> "TrackingOutcome | None":
        """What was known last of a run's results; None if the run wasn't tracked, or was killed."""
        try:
            return cls.model_validate_json((folder / _FILE_NAME).read_bytes())
        except (OSError, ValidationError):
            return None

    @classmethod
    def of(cls, delivery: Delivery, *, folder: Path, trouble: str, waiting: int, uri: str = "") -> "TrackingOutcome":
        """What became of a run's events.

        Args:
            delivery: has written them.
            folder: the run's folder.
            trouble: why some aren't in MLflow; empty if all are.
            waiting: number of those that aren't.
            uri: of the store, without credentials, unless it is the run's own.
        """
        files = len(delivery.run.uploads)
        parts = [f"{waiting} events"] * bool(waiting) + [f"{files} files"] * bool(files)
        known = cls(experiment_id=delivery.run.experiment_id, run_id=delivery.run.run_id, delivered=True, uri=uri)
        if trouble:
            return known.lacking(" and ".join(parts) or "some results", folder=folder, trouble=trouble)
        if not delivery.refused:
            return known
        message = f"MLflow refused {delivery.refused} events; they are in {folder / FILE_NAME}"
        return known.model_copy(update={"message": message})

    def lacking(self, what: str, *, folder: Path, trouble: str) -> "TrackingOutcome":
        """The same when MLflow doesn't have everything.

        Args:
            what: isn't there, e.g. "some results".
            folder: the run's folder.
            trouble: why.
        """
        message = (
            f"{what} aren't in MLflow ({trouble}); they are in {folder / FILE_NAME}, "
            f"send them with: pipeline sync {folder}{f' --to {self.uri}' if self.uri else ''}"
        )
        return self.model_copy(update={"delivered": False, "message": message})
