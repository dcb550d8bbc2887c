"""A function in a child process, whose parent may be killed."""

import subprocess
import sys

import psutil

WAITS = """
import os, time
from pipeline.system.child import call_in_child

def wait(report):
    report(os.getpid())
    time.sleep(600)

call_in_child(wait, receive=lambda pid: print(pid, flush=True))
"""


def test_a_child_that_waits_for_ever_ends_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        try:
            child.wait(timeout=20)  # until another process has collected it
        finally:
            if child.is_running():
                child.kill()
