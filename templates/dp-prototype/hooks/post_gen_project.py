"""Completes a rendered project. The same file in each template; needs only Python, and git if it is installed.

Cookiecutter renders it and runs it in the new project; `pipeline new` imports it unrendered and calls its functions.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

ANSWERS = r'''{{ cookiecutter | jsonify | replace("'", "\\u0027") }}'''

DISTRIBUTION = "ddp-pipeline"
METADATA = ".cruft.json"
SOURCE = "pipeline.mk"
LOCAL = "pipeline.local.mk"
"""File with settings for this machine only, ignored by git."""
TREE = "Template-Tree"
"""Trailer of a commit with only the template's rendered files: the hash of their tree."""
ADD = ("add", "--all", "--force", "--", ".", f":(exclude){LOCAL}")
"""Arguments of git that add all rendered files, whatever the user's global ignore file has."""


class Origin(NamedTuple):
    """Origin of a template."""

    template: str = ""
    """Address of the repository; empty if there is none that other machines can reach."""
    directory: str = ""
    """The template's folder in the repository."""
    commit: str | None = None
    source: str = ""
    """Requirement from which pip can install ddp-pipeline; empty if unknown."""


def finish(project: Path, answers: Mapping[str, str], origin: Origin) -> None:
    """Remove files that the answers exclude; write the origin of template and package."""
    for name in _unwanted(answers):
        path = project / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    is_local = bool(origin.source) and not re.match(r"(git\+)?(https?|ssh)://", origin.source)
    (project / SOURCE).write_text(
        f"# Origin of {DISTRIBUTION} for `make install`, on all machines: git+https://HOST/REPOSITORY@COMMIT.\n"
        f"# {LOCAL} takes precedence: a checkout on this machine, ignored by git. The variable in the environment\n"
        f"# or after `make` takes precedence over both.\n"
        f"-include {LOCAL}\n{_assignment('' if is_local else origin.source)}",
        encoding="utf-8",
    )
    if is_local:
        (project / LOCAL).write_text(_assignment(origin.source), encoding="utf-8")
    if "_commit" not in answers:  # else cruft renders, and writes its own
        state = {
            "template": origin.template,
            "commit": origin.commit,
            "checkout": None,
            "context": {"cookiecutter": {key: answers[key] for key in sorted(answers) if _is_answer(key)}},
            "directory": origin.directory,
            "skip": [".git", METADATA, SOURCE, LOCAL],
        }
        (project / METADATA).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")


def _assignment(source: str) -> str:
    """Return a conditional assignment for make."""
    text = source.replace("$", "$$").replace("#", "\\#")
    return f"ifeq ($(strip $(PIPELINE_SOURCE)),)\nPIPELINE_SOURCE := {text}".rstrip() + "\nendif\n"


def _is_answer(key: str) -> bool:
    """Return True for the answer to a question, or a setting that can be given instead of its default."""
    return not key.startswith("_") or (
        key.startswith("__") and not key.startswith(("__ask_", "__checked", "__project_slug"))
    )


def _unwanted(answers: Mapping[str, str]) -> Iterator[str]:
    if answers.get("__docker") == "no":
        yield from ("docker", ".dockerignore")
    if answers.get("task") == "finetune":  # the model is a component of ddp-pipeline
        yield f"src/{answers['__package_name']}/model.py"
    if answers.get("task") in ("supervised", "finetune"):
        yield f"src/{answers['__package_name']}/task.py"
    examples = {"image_folder": "example_images", "table": "example_table"}
    for data, name in examples.items():
        if not answers.get("data", data).startswith(data):
            yield f"src/{answers['__package_name']}/{name}.py"


def find_origin(template: Path | None, named: str = "") -> Origin:
    """Return the origin of the template in a folder, which was ``named`` on the command line."""
    if template is None:
        return Origin()
    if _git(template, "ls-files", "--error-unmatch", "cookiecutter.json") is None:
        return Origin(directory=template.name, source=_installed_from(template))
    root, commit = Path(_git(template, "rev-parse", "--show-toplevel") or ""), _git(template, "rev-parse", "HEAD")
    directory = template.resolve().relative_to(root.resolve()).as_posix()
    address = _git(root, "remote", "get-url", "origin") or ""
    if not named or Path(named).exists() or not address:
        return Origin(_shared(address), directory, commit, _checkout(template))
    return Origin(_shared(address), directory, commit, _at_commit(address, commit))


def _at_commit(address: str, commit: str | None) -> str:
    """Return the requirement of a commit for pip."""
    return f"git+{_public(address)}@{commit}" if commit and "://" in address else ""


def _shared(address: str) -> str:
    """Return an address without a password, or "" for a folder, which other machines don't have."""
    is_shared = re.match(r"(?!file:)\w[\w+.-]*://|[\w.-]+@[\w.-]+:", address)
    return _public(address) if is_shared else ""


def _public(address: str) -> str:
    """Remove the password from an address."""
    return re.sub(r"//[^/@]*@", "//", address)


def _checkout(template: Path) -> str:
    """Return the folder above the template that pip can install, or ""."""
    name = re.compile(rf'^name = "{DISTRIBUTION}"$', re.MULTILINE)
    for folder in template.resolve().parents:
        file = folder / "pyproject.toml"
        if file.is_file() and name.search(file.read_text(encoding="utf-8")):
            return str(folder)
    return ""


def _installed_from(template: Path) -> str:
    """Return the origin of the installed package that contains the template, as recorded by pip (PEP 610)."""
    if checkout := _checkout(template):
        return checkout
    try:
        noted = json.loads(metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        return ""
    address = _public(noted.get("url", ""))
    if commit := noted.get("vcs_info", {}).get("commit_id"):
        return _at_commit(address, commit)
    return url2pathname(urlsplit(address).path) if address.startswith("file:") else address


def commit(project: Path, template: str) -> str | None:
    """Make the project a git repository with a first commit; return the reason if this fails."""
    if shutil.which("git") is None:
        return "git isn't installed"
    if _git(project, "rev-parse", "--git-dir") is not None:
        return f"{project} lies in a git repository already"
    try:
        _run_git(project, "init", "--quiet")
        _run_git(project, *ADD)
        message = f"Create the project from the template {template}\n\n{TREE}: {_run_git(project, 'write-tree')}"
        options = ("--quiet", "--no-verify", "--no-gpg-sign", "--message", message)
        _run_git(project, *identity(project), "commit", *options)
    except subprocess.CalledProcessError as error:
        reason = " ".join(f"{error.stderr} {error.stdout}".split())
        return f"git failed: {reason or f'exit code {error.returncode}, without a message'}"
    return None


def identity(project: Path) -> list[str]:
    """Return options that set an author if git has none."""
    if _git(project, "config", "user.email"):
        return []
    return ["-c", "user.name=ddp-pipeline", "-c", "user.email=ddp-pipeline@localhost"]


def next_commands(project: str) -> str:
    """Return the next commands for the user."""
    run = "pipeline run experiments/first.yaml"
    return f"{project} is ready. Next:\n  cd {project}\n  pip install -e .\n  {run} --quick\n  {run}"


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of git, or None if it fails or isn't installed."""
    try:
        return _run_git(folder, *arguments)
    except (OSError, subprocess.CalledProcessError):
        return None


def _run_git(folder: Path, *arguments: str) -> str:
    """Return the output of git.

    Raises:
        CalledProcessError: git failed.
    """
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _found(named: str, answers: Mapping[str, str], *, holding: str = "") -> Path | None:
    """Find a path that is relative to cookiecutter's working directory, which is unknown here."""
    output = Path(answers["_output_dir"])
    starts = [Path(os.environ.get("PWD", "/")), output, *output.parents]
    return next((start / named for start in starts if (start / named / holding).exists()), None)


def main() -> None:
    """Finish the project in the working directory."""
    answers, project = json.loads(ANSWERS), Path.cwd()
    if "_commit" in answers:  # cruft renders: it writes its metadata itself, and also renders for comparison
        named = answers["_template"]
        source = str(Path(named).resolve()) if Path(named).is_dir() else _at_commit(named, answers["_commit"])
        finish(project, answers, Origin(source=source))
        return
    template = _found(answers["_repo_dir"], answers, holding="cookiecutter.json")
    origin = find_origin(template, named=str(_found(answers["_template"], answers) or answers["_template"]))
    finish(project, answers, origin)
    if problem := commit(project, template.name if template else answers["_template"]):
        print(f"note: no first commit: {problem}", file=sys.stderr)
    print(next_commands(os.path.relpath(project, answers["_output_dir"])))


if __name__ == "__main__":
    main()
