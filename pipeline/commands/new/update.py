"""Template updates as git merges.

Each rendering of the template is a commit in the project's history: the first commit, and a commit on a side branch for
each update. Git finds the merge base from these commits, so an update needs neither the template's history nor the
machine that created the project.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline.commands.new import answers, catalog
from pipeline.commands.new.answers import Answers
from pipeline.commands.new.catalog import Template
from pipeline.commands.new.create import render
from pipeline.errors import UsageError


class Updated(NamedTuple):
    """Files changed by an update."""

    files: tuple[str, ...]
    """Files that changed in the template; empty if the template is unchanged."""
    conflicts: tuple[str, ...]
    """Files with conflict markers."""


class _Rendering(NamedTuple):
    commit: str
    tree: str


def update(project: Path, settings: Sequence[str]) -> Updated:
    """Merge the installed version of the project's template into the project.

    Raises:
        UsageError: not a generated project, uncommitted changes, or a wrong answer; nothing was changed.
    """
    template, given = _recorded(project)
    given = answers.still_asked({**given, **answers.parse(settings, template)}, template)
    complete = answers.complete(template, given, no_input=True)
    _check_clean(project)
    hook = template.finishing()
    last = _last_rendering(project, mark=hook.TREE)
    with tempfile.TemporaryDirectory() as folder:
        rendered = render(template, complete, into=Path(folder), source=_source(project / hook.SOURCE))
        tree = _tree(project, rendered, add=hook.ADD)
        local = rendered / hook.LOCAL
        if (
            local.is_file() and not (project / hook.LOCAL).exists()
        ):  # older projects have its contents in a committed file
            shutil.copy(local, project / hook.LOCAL)
    changed = _git(project, "diff-tree", "-r", "--name-only", last.tree, tree).splitlines()
    if set(changed) <= {hook.METADATA}:
        return Updated((), ())
    message = f"Render the template {template.name} again\n\n{hook.TREE}: {tree}"
    commit = _git(project, *hook.identity(project), "commit-tree", tree, "-p", last.commit, "-m", message)
    title = f"Update from the template {template.name}"
    merge = [*hook.identity(project), "merge", "--quiet", "--no-ff", "--no-verify", "--message", title, commit]
    done = _run(project, *merge)
    conflicts = _git(project, "diff", "--name-only", "--diff-filter=U").splitlines()
    if done.returncode and not conflicts:
        raise UsageError(f"git can't merge the template: {' '.join(f'{done.stdout} {done.stderr}'.split())}")
    return Updated(tuple(changed), tuple(conflicts))


def _recorded(project: Path) -> tuple[Template, Answers]:
    """Read the template and the answers that the project was created with."""
    file = project / ".cruft.json"
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        name, given = Path(state["directory"]).name, _texts(state["context"]["cookiecutter"])
    except FileNotFoundError:
        raise UsageError(f"{file} is not there; run this in a project that was generated from a template") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            f"{file} can't be read ({_what(error)}); restore it from git: git checkout -- {file.name}"
        ) from None
    return catalog.find(name), given


def _texts(answers: object) -> Answers:
    """Check that all answers are single lines of text; return them.

    Raises:
        TypeError: an answer is not a line of text.
    """
    if not isinstance(answers, dict):
        raise TypeError("the answers are no mapping")
    for key, value in answers.items():
        if not isinstance(value, str) or not value.isprintable():
            raise TypeError(f"{key} is no line of text")
    return answers


def _what(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _check_clean(project: Path) -> None:
    top = _run(project, "rev-parse", "--show-toplevel")
    if top.returncode or Path(top.stdout.strip()).resolve() != project.resolve():
        raise UsageError(f"{project} is not the top folder of a git repository, which updates need; try `cruft update`")
    if _git(project, "status", "--porcelain", "--untracked-files=no"):
        raise UsageError(f"{project} has uncommitted changes; commit or stash them first, so that nothing can be lost")


def _last_rendering(project: Path, *, mark: str) -> _Rendering:
    """Return the newest commit that contains only the template's files."""
    form = f"--format=%H %T %(trailers:key={mark},valueonly,separator=%x20)"
    log = _git(project, "log", "--topo-order", form).splitlines()
    marked = next((line.split() for line in log if len(line.split()) == 3), None)
    if marked is None:
        raise UsageError(
            f"no commit of {project} has the trailer {mark}: its history was rewritten; try `cruft update`"
        )
    commit, tree, meant = marked
    if tree != meant:
        problem = f"commit {commit[:10]} was amended: it holds more than the template's files"
        raise UsageError(f"{problem}, so your changes in it would be lost; try `cruft update`")
    return _Rendering(commit, tree)


def _tree(project: Path, rendered: Path, *, add: Sequence[str]) -> str:
    """Write the rendered files as a tree to the project's repository, without touching its index and working tree."""
    with tempfile.TemporaryDirectory() as folder:
        git_dir = _git(project, "rev-parse", "--absolute-git-dir")
        where = {"GIT_DIR": git_dir, "GIT_WORK_TREE": str(rendered), "GIT_INDEX_FILE": str(Path(folder) / "index")}
        _git(rendered, *add, environment=where)
        return _git(rendered, "write-tree", environment=where)


def _source(file: Path) -> str:
    """Read the requirement that the project installs ddp-pipeline from, or ""."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return next((line.split(":=", 1)[1].strip() for line in lines if ":=" in line), "")


def _git(folder: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    done = _run(folder, *arguments, environment=environment)
    if done.returncode:
        raise UsageError(f"{folder}: git {arguments[0]} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def _run(
    folder: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    line, full = ["git", *arguments], {**os.environ, **(environment or {})}
    try:
        return subprocess.run(line, cwd=folder, env=full, capture_output=True, text=True, check=False)  # noqa: S603 - git
    except FileNotFoundError:
        raise UsageError("git is not installed; updates need it") from None
