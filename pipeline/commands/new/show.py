"""What ``pipeline new`` says."""

from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.commands.new import create as creation
from pipeline.commands.new import update as updating

Say = Callable[[str], None]


def create(template: str | None, directory: Path | None, settings: Sequence[str], *, no_input: bool, say: Say) -> None:
    """Create a project and say what to do next.

    Raises:
        UsageError: see `pipeline.commands.new.create.create`.
    """
    created = creation.create(template, directory, settings, no_input=no_input)
    if created.warning:
        say(f"note: no first commit: {created.warning}")
    say(created.next_commands)


def update(project: Path, settings: Sequence[str], *, say: Say) -> int:
    """Update a project and say what has changed; returns the exit code, 1 for conflicts.

    Raises:
        UsageError: see `pipeline.commands.new.update.update`.
    """
    updated = updating.update(project, settings)
    if not updated.files:
        say("nothing has changed in the template")
    for file in updated.files:
        say(f"{'conflict' if file in updated.conflicts else 'updated '}  {file}")
    if updated.conflicts:
        say("Mend the conflicts, git add the files and git commit; or undo it all with git merge --abort.")
    return 1 if updated.conflicts else 0
