"""Completes a rendered project; needs only Python, and git if it is installed.

Cookiecutter renders this file and runs it in the new project. `pipeline new` calls its functions.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

ANSWERS = r'''{{ cookiecutter | jsonify | replace("'", "\\u0027") }}'''
DISTRIBUTION = "ddp-pipeline"


def remove_unused(project: Path, answers: Mapping[str, str]) -> None:
    """Remove the files that the answers exclude."""
    if answers.get("docker") == "no":
        shutil.rmtree(project / "docker")
        (project / ".dockerignore").unlink()


def finish(project: Path, answers: Mapping[str, str], template: Path | None) -> None:
    """Remove unused files, and write those of this machine: the origin of ddp-pipeline, and the schema for editors."""
    remove_unused(project, answers)
    source = find_source(template).replace("$", "$$").replace("#", "\\#")
    (project / "pipeline.mk").write_text(f"PIPELINE_SOURCE ?= {source}".rstrip() + "\n", encoding="utf-8")
    schema = _output_of([sys.executable, "-m", "pipeline", "schema"], project)
    if schema is not None:  # else `make install` writes it
        (project / "experiments" / "experiment.schema.json").write_text(schema + "\n", encoding="utf-8")


def find_source(template: Path | None) -> str:
    """Return what pip can install ddp-pipeline from: the template's checkout, or the origin that pip recorded."""
    name = re.compile(rf'^name = "{DISTRIBUTION}"$', re.MULTILINE)
    for folder in template.resolve().parents if template else ():
        file = folder / "pyproject.toml"
        if file.is_file() and name.search(file.read_text(encoding="utf-8")):
            return str(folder)
    try:
        origin = json.loads(metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")  # PEP 610
    except metadata.PackageNotFoundError:
        return ""
    address = origin.get("url", "")
    if commit := origin.get("vcs_info", {}).get("commit_id"):
        return f"git+{address}@{commit}"
    return url2pathname(urlsplit(address).path) if address.startswith("file:") else address


def commit(project: Path, template: str) -> str:
    """Make the project a git repository with a first commit; return the reason if this fails, or ""."""
    if shutil.which("git") is None:
        return "git isn't installed"
    if _output_of(["git", "rev-parse", "--git-dir"], project) is not None:
        return f"{project} lies in a git repository already"
    author = ["-c", f"user.name={DISTRIBUTION}", "-c", f"user.email={DISTRIBUTION}@localhost"]
    if _output_of(["git", "config", "user.email"], project):
        author = []
    message = f"Create the project from the template {template}"
    for line in (
        ["init", "--quiet"],
        ["-c", "core.excludesFile=", "add", "--all"],  # whatever the user's own ignore file has
        [*author, "commit", "--quiet", "--no-verify", "--no-gpg-sign", "--message", message],
    ):
        done = subprocess.run(["git", *line], cwd=project, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = " ".join(f"{done.stderr} {done.stdout}".split())
            return f"git failed: {reason or f'exit code {done.returncode}, without a message'}"
    return ""


def next_commands(project: str) -> str:
    """Return the next commands for the user."""
    run = "pipeline run experiments/first.yaml"
    return f"{project} is ready. Next:\n  cd {shlex.quote(project)}\n  pip install -e .\n  {run} --quick\n  {run}"


def _output_of(line: list[str], folder: Path) -> str | None:
    """Return what a program prints, or None if it fails or isn't installed."""
    try:
        return subprocess.run(line, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _find_template(answers: Mapping[str, str]) -> Path | None:
    """Find the template, whose path is relative to cookiecutter's working directory, which is unknown here."""
    output = Path(answers["_output_dir"])
    folders = (start / answers["_repo_dir"] for start in (Path(os.environ.get("PWD", "/")), output, *output.parents))
    return next((folder for folder in folders if (folder / "cookiecutter.json").is_file()), None)


def main() -> None:
    """Complete the project in the working directory."""
    answers, project = json.loads(ANSWERS), Path.cwd()
    if "_commit" in answers:  # cruft compares files, those of a machine left out
        remove_unused(project, answers)
        return
    template = _find_template(answers)
    finish(project, answers, template)
    if problem := commit(project, template.name if template else answers["_template"]):
        print(f"note: no first commit: {problem}", file=sys.stderr)
    print(next_commands(os.path.relpath(project, answers["_output_dir"])))


if __name__ == "__main__":
    main()
