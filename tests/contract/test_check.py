"""``pipeline check`` as a command: each file in a process of its own, of which nothing is left."""

# promise: a script without a guard, and files that hide a library, are named
# promise: `check` finds what `run` finds, accepts what runs; a crash is an error

import subprocess
from collections.abc import Callable
from pathlib import Path


def test_a_crash_in_native_code_is_an_error_of_its_file(
    start: Callable[..., "subprocess.Popen[str]"], project: Path
) -> None:
    good = (project / "lab.yaml").read_text()
    for name in ("Crashing", "Lingering"):
        (project / f"{name}.yaml").write_text(good.replace("lab.Net", f"lab.{name}"))
    before = _files(project)

    process = start("check", "Crashing.yaml", "Lingering.yaml", cwd=project)
    stdout, stderr = process.communicate(timeout=200)

    assert process.returncode == 1
    assert stdout == "Lingering.yaml: ok\n"
    stack, _, message = stderr.rpartition("error: ")
    assert message.startswith("Crashing.yaml: the check crashed: its process was ended by SIGSEGV\n")
    assert "in forward" in stack
    assert _files(project) == before


def _files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}
