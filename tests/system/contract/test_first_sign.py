"""The first sign of a command on a terminal, and what is left of it."""

# promise: a terminal shows at once what is waited for, then a bar that moves, and what is done after the last step

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]


def read(terminal: int) -> Iterator[str]:
    """What is printed on a terminal, until the last process on it has ended."""
    while True:
        try:
            yield os.read(terminal, 4096).decode()
        except OSError:
            return


def test_a_terminal_shows_what_a_command_waits_for_and_ctrl_c_leaves_a_clean_line(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    line = [sys.executable, "-m", "pipeline", "run", str(ROOT / "experiments" / "mlp.yaml")]
    environment = {**os.environ, "TERM": "xterm-256color"}
    with subprocess.Popen(
        line, cwd=tmp_path, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        printed = ""
        for text in read(ours):
            printed += text
            if "importing torch ..." in printed:
                break
        os.killpg(process.pid, signal.SIGINT)
        printed += "".join(read(ours))
        code = process.wait(60)
    os.close(ours)

    assert "reading the experiment ..." in printed
    assert "importing torch ..." in printed
    assert printed.count("\x1b[?25l") == printed.count("\x1b[?25h") > 0, "the cursor is gone"
    after = printed.rpartition("\x1b[?25h")[2].rpartition("\x1b[2K")[2]
    assert code == 130, printed
    assert after.strip().startswith("error: interrupted"), printed
    assert not (tmp_path / "runs").exists()


INTERRUPTED = """
import os, signal, sys

class AtImport:
    def find_spec(self, name, *_):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, AtImport())
from pipeline.__main__ import main
main()
"""


def test_ctrl_c_while_the_command_itself_is_imported_is_answered_in_a_line() -> None:
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "\nerror: interrupted\n")
