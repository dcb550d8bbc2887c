"""``pipeline check`` as a command: what a file's code does, and that nothing of it is left."""

# promise: a script without a guard, and files that hide a library, are named
# promise: `check` finds what `run` finds, accepts what runs; a crash is an error

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path


def test_what_a_file_s_code_leaves_is_ended_its_errors_take_a_line_and_a_crash_ends_the_command_with_its_stack(
    start: Callable[..., "subprocess.Popen[str]"], project: Path
) -> None:
    good = (project / "lab.yaml").read_text()
    for name, old in (("Crashing", "lab.Net"), ("Lingering", "lab.Net"), ("from_a_file", "lab.points")):
        (project / f"{name}.yaml").write_text(good.replace(old, f"lab.{name}"))
    before = _files(project)

    process = start("check", "Lingering.yaml", "lab.yaml", "from_a_file.yaml", cwd=project)
    stdout, stderr = process.communicate(timeout=200)
    assert (process.returncode, stdout) == (2, "Lingering.yaml: ok\nlab.yaml: ok\n")
    assert "were killed" in stderr
    assert "raised FileNotFoundError: points.csv is not on this disk (lab.py:37)" in stderr
    assert "Traceback" not in stderr

    process = start("check", "Crashing.yaml", cwd=project)
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in stderr
    assert "in forward" in stderr
    assert _files(project) == before


def _files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}
