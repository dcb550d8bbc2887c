"""Refuses a name that a project can't have. Cookiecutter runs this file; `pipeline new` calls its function."""

import importlib.util
import json
import keyword
import re
import sys

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
    found = importlib.util.find_spec(package)
    is_installed = found is not None and found.origin is not None  # without an origin it is any folder of that name
    if package in TAKEN or package in sys.stdlib_module_names or is_installed:
        return f"project_name: a package {package} exists already; write another, for instance {package}-experiments"
    return ""


if __name__ == "__main__":
    answers = json.loads(ANSWERS)
    is_new = "_commit" not in answers  # cruft renders projects again that are installed
    if is_new and (problem := name_problem(answers["project_name"], answers["__package_name"])):
        sys.exit(f"error: {problem}")
