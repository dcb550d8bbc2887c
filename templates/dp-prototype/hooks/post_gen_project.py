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
from urllib.parse import urlsplit
from urllib.request import url2pathname

ANSWERS = r'''{{ cookiecutter | jsonify | replace("'", "\\u0027") }}'''

DISTRIBUTION = "ddp-pipeline"
SOURCE = "pipeline.mk"
LOCAL = "pipeline.local.mk"
"""File with settings for this machine only, ignored by git."""
ADD = ("add", "--all", "--force", "--", ".", f":(exclude){LOCAL}")
"""Arguments of git that add all rendered files, whatever the user's global ignore file has."""


def finish(project: Path, answers: Mapping[str, str], source: str) -> None:
    """Remove files that the answers exclude; write the requirement from which pip can install ddp-pipeline, or ""."""
    for name in _unwanted(answers):
        path = project / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    is_local = bool(source) and not re.match(r"(git\+)?(https?|ssh)://", source)
    (project / SOURCE).write_text(
        f"# Origin of {DISTRIBUTION} for `make install`, on all machines: git+https://HOST/REPOSITORY@COMMIT.\n"
        f"# {LOCAL} takes precedence: a checkout on this machine, ignored by git. The variable in the environment\n"
        f"# or after `make` takes precedence over both.\n"
        f"-include {LOCAL}\n{_assignment('' if is_local else source)}",
        encoding="utf-8",
    )
    if is_local:
        (project / LOCAL).write_text(_assignment(source), encoding="utf-8")


def _assignment(source: str) -> str:
    """Return a conditional assignment for make."""
    text = source.replace("$", "$$").replace("#", "\\#")
    return f"ifeq ($(strip $(PIPELINE_SOURCE)),)\nPIPELINE_SOURCE := {text}".rstrip() + "\nendif\n"


def _unwanted(answers: Mapping[str, str]) -> Iterator[str]:
    if answers.get("docker") == "no":
        yield from ("docker", ".dockerignore")
    for data, name in (("image_folder", "example_images"), ("table", "example_table")):
        if answers.get("data", data) != data:
            yield f"src/{answers['__package_name']}/{name}.py"


def find_source(template: Path | None, named: str = "") -> str:
    """Return where ddp-pipeline comes from, for a template in a folder, which was ``named`` on the command line."""
    if template is None:
        return ""
    if _git(template, "ls-files", "--error-unmatch", "cookiecutter.json") is None:
        return _installed_from(template)
    address = _git(template, "remote", "get-url", "origin") or ""
    if not named or Path(named).exists() or not address:
        return _checkout(template)
    return _at_commit(address, _git(template, "rev-parse", "HEAD"))


def _at_commit(address: str, commit: str | None) -> str:
    """Return the requirement of a commit for pip."""
    return f"git+{_public(address)}@{commit}" if commit and "://" in address else ""


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
        message = f"Create the project from the template {template}"
        options = ("--quiet", "--no-verify", "--no-gpg-sign", "--message", message)
        _run_git(project, *_identity(project), "commit", *options)
    except subprocess.CalledProcessError as error:
        reason = " ".join(f"{error.stderr} {error.stdout}".split())
        return f"git failed: {reason or f'exit code {error.returncode}, without a message'}"
    return None


def _identity(project: Path) -> list[str]:
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
    if "_commit" in answers:  # cruft renders, also to compare
        named = answers["_template"]
        source = str(Path(named).resolve()) if Path(named).is_dir() else _at_commit(named, answers["_commit"])
        finish(project, answers, source)
        return
    template = _found(answers["_repo_dir"], answers, holding="cookiecutter.json")
    source = find_source(template, named=str(_found(answers["_template"], answers) or answers["_template"]))
    finish(project, answers, source)
    if problem := commit(project, template.name if template else answers["_template"]):
        print(f"note: no first commit: {problem}", file=sys.stderr)
    print(next_commands(os.path.relpath(project, answers["_output_dir"])))


if __name__ == "__main__":
    main()
