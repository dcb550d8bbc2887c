"""A project of one's own: what cookiecutter writes passes its own tests, training on two workers included."""

# promise: a project from the template passes its own tests

import os
import re
from pathlib import Path

from baking import REPOSITORY, succeed


def test_a_project_from_the_template_passes_its_own_tests(tmp_path: Path) -> None:
    template = REPOSITORY / "templates" / "ddp-project"
    succeed(tmp_path, "cookiecutter", template, "--no-input", "project_name=First steps")
    (project,) = (folder for folder in tmp_path.iterdir() if (folder / "pyproject.toml").is_file())

    path = os.pathsep.join([str(project / "src"), str(REPOSITORY)])  # what `make install` would do
    out = succeed(project, "pytest", "-q", "-p", "no:cacheprovider", PYTHONPATH=path)

    assert re.search(r"^\d+ passed(, \d+ warnings?)? in ", out, re.MULTILINE), out
