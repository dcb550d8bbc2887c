"""``pipeline check`` as a command: what a file's code does, and that nothing of it is left."""

# promise: a script without a guard, and files that hide a library, are named
# promise: `check` finds what `run` finds, accepts what runs; a crash is an error

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path


def test_what_a_file_s_code_leaves_is_ended_and_a_crash_in_native_code_ends_the_command_with_its_stack(
    start: Callable[..., "subprocess.Popen[str]"], project: Path
) -> None:
    good = (project / "lab.yaml").read_text()
    for name in ("Crashing", "Lingering"):
        (project / f"{name}.yaml").write_text(good.replace("lab.Net", f"lab.{name}"))
    before = _files(project)

    process = start("check", "Lingering.yaml", "lab.yaml", cwd=project)
    stdout, stderr = process.communicate(timeout=200)
    assert (process.returncode, stdout) == (0, "Lingering.yaml: ok\nlab.yaml: ok\n")
    assert "were killed" in stderr

    process = start("check", "Crashing.yaml", cwd=project)
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in stderr
    assert "in forward" in stderr
    assert _files(project) == before


def _files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}
