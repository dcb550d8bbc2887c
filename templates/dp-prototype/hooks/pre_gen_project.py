"""Refuses a name that a project can't have. The same file in each template; `pipeline new` calls its function."""

import importlib.util
import json
import keyword
import re
import sys
from pathlib import Path

ANSWERS = r'''{{ cookiecutter | jsonify | replace("'", "\\u0027") }}'''
TAKEN = {
    *("src", "test", "tests", "conftest", "experiments", "docker", "notebooks", "google"),
    *("pipeline", "torch", "torchmetrics", "ray", "mlflow", "numpy"),
}
"""Names of packages that a project has or needs, also where cookiecutter runs without them."""


def name_problem(project: str, package: str) -> str:
    """Return what is wrong with the name of a project, or of its package; empty if nothing is."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9 ._-]{0,79}", project):
        return f"project_name: {project!r} is not a name; write letters, digits, spaces, '.', '-', '_', a letter first"
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,49}", package) or keyword.iskeyword(package):
        return f"project_name: {package!r} can't be the name of its package; write another name"
    if package in TAKEN or package in sys.stdlib_module_names or _is_installed(package):
        return f"project_name: a package {package} exists already; write another, for instance {package}-experiments"
    return ""


def _is_installed(package: str) -> bool:
    """Return True if the package can be imported and isn't that of a project which cruft updates."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # without an origin it is any folder of that name
        return False
    return not any((folder / ".cruft.json").is_file() for folder in Path(spec.origin).parents[1:3])


if __name__ == "__main__":
    answers = json.loads(ANSWERS)
    if problem := name_problem(answers["project_name"], answers["__package_name"]):
        sys.exit(f"error: {problem}")
