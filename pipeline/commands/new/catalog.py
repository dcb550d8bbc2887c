"""The templates and their questions. A UsageError from here names what is missing or broken in them."""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from pipeline.errors import UsageError
from pipeline.system import PACKAGE
from pipeline.wording import did_you_mean

_CONTEXT = "cookiecutter.json"


class Template(NamedTuple):
    """A cookiecutter template."""

    name: str
    folder: Path
    description: str = ""

    def variables(self) -> dict[str, Any]:
        """Return the content of cookiecutter.json."""
        return _read(self.folder / _CONTEXT)

    def questions(self) -> dict[str, tuple[str, ...]]:
        """Return the questions with the allowed answers, the default first; an empty tuple allows any text."""
        asked = {key: value for key, value in self.variables().items() if not key.startswith("_")}
        return {key: tuple(value) if isinstance(value, list) else () for key, value in asked.items()}

    def module(self, file: str) -> ModuleType:
        """Import a Python file of the template, so that its functions can be called without cookiecutter."""
        path = self.folder / file
        if not path.is_file():
            raise UsageError(_broken(path, "is missing"))
        spec = importlib.util.spec_from_file_location(f"_{self.name}_{path.stem}".replace("-", "_"), path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def finishing(self) -> ModuleType:
        """Import the hook that completes a rendered project."""
        return self.module("hooks/post_gen_project.py")


def root() -> Path:
    """Return the folder of the templates: in the installed package, or next to it in a checkout."""
    installed = PACKAGE / "_templates"
    return installed if installed.is_dir() else PACKAGE.parent / "templates"


def names() -> tuple[str, ...]:
    """Return the names of all templates; the first is the default."""
    return tuple(_listed())


def find(name: str) -> Template:
    """Return the template with this name.

    Raises:
        UsageError: there is no such template, or it is broken.
    """
    listed = _listed()
    if name not in listed:
        known = ", ".join(listed)
        raise UsageError(f"{name}: no such template{did_you_mean(name, listed)}; choose one of {known}")
    entry = listed[name]
    if not isinstance(entry, Mapping) or not isinstance(entry.get("path"), str):
        raise UsageError(_broken(root() / _CONTEXT, f"gives no path for {name}"))
    return Template(name, (root() / entry["path"]).resolve(), str(entry.get("description", "")))


def _listed() -> dict[str, Any]:
    templates = _read(root() / _CONTEXT).get("templates")
    if not isinstance(templates, dict) or not templates:
        raise UsageError(_broken(root() / _CONTEXT, "lists no templates"))
    return templates


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(_broken(file, "is missing")) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(_broken(file, f"can't be read: {error}")) from None
    if not isinstance(content, dict):
        raise UsageError(_broken(file, "is no mapping"))
    return content


def _broken(file: Path, what: str) -> str:
    return f"{file}: {what}; the templates are broken, install ddp-pipeline again or restore the file"
