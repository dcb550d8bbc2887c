"""``pipeline run --again RUN``: what differs from the run that is repeated, and whether its losses are the same."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pipeline.errors import UsageError
from pipeline.recording.journal import loss_file, runs
from pipeline.recording.journal.folder import is_quick, read_state
from pipeline.recording.journal.run_summary import data_of, environment_of, last_opened
from pipeline.wording import counted


class Repetition:
    """A training to repeat.

    Args:
        name: as `pipeline.recording.journal.runs.find` takes it.

    Raises:
        UsageError: there is no such run, it is running, or it is no training.
        ExperimentError: its experiment.yaml is not valid in this version.
    """

    def __init__(self, name: str) -> None:
        try:
            self.folder = runs.find(name, Path("runs"))
        except UsageError as error:
            raise UsageError(f"--again {error}") from None
        state = read_state(self.folder)
        role = state.opened.tags.get("role", "main")
        if role != "main":
            raise UsageError(f"--again {name}: {self.folder.name} is a {role}. Name a run of pipeline run.")
        if state.status == "RUNNING":
            raise UsageError(f"--again {name}: {self.folder.name} is still running. Repeat it after it has ended.")
        self.is_quick = is_quick(state.opened)
        """True if it was started with ``--quick``."""

    def warn_of_environment(self, folder: Path, *, warn: Callable[[str], None]) -> None:
        """Warn of each difference of code, machine and packages to the run that repeats it."""
        self._warn(environment_of(self.folder), environment_of(folder), warn=warn)
        if all(last_opened(each).tags.get("git_dirty") == "true" for each in (self.folder, folder)):
            warn(f"both {self.folder.name} and this run have changes that are not committed: the code may differ")

    def warn_of_data(self, folder: Path, *, warn: Callable[[str], None]) -> None:
        """Warn of each difference of the data."""
        self._warn(data_of(self.folder), data_of(folder), warn=warn)

    def _warn(self, before: Mapping[str, str], now: Mapping[str, str], *, warn: Callable[[str], None]) -> None:
        for name in dict.fromkeys((*before, *now)):
            if before.get(name) != now.get(name):
                warn(f"{name} is {now.get(name, 'missing')}, was {before.get(name, 'missing')} in {self.folder.name}")

    def describe_losses(self, folder: Path) -> str:
        """Say whether a run has the losses of the repeated one, see `describe_losses`."""
        return describe_losses(loss_file.read(self.folder), loss_file.read(folder), earlier=self.folder.name)


def describe_losses(before: Sequence[float], now: Sequence[float], *, earlier: str) -> str:
    """Say whether two trainings have the same losses, or which is the first step that differs."""
    common = min(len(before), len(now))
    if not common:
        return f"no losses to compare: {earlier if not before else 'this run'} has none"
    for step, (was, is_now) in enumerate(zip(before, now, strict=False), 1):
        if was.hex() != is_now.hex():  # equal for two NaN, but not for 0.0 and -0.0
            return f"losses differ from step {step} of {common}: {is_now!r}, was {was!r} in {earlier}"
    if len(before) != len(now):
        lengths = f"{earlier} has {len(before)}, this run {len(now)}"
        return f"same losses to the bit in the first {counted(common, 'step')}; {lengths}"
    return f"same losses to the bit in all {counted(common, 'step')}"
