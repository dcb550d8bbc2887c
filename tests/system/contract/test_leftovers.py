"""Threads and processes that user code has left when a command ends."""

# promise: user code leaves threads or processes: the command ends and names them

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
from waiting import eventually

LEAVING = """
import multiprocessing, subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from pipeline import system

def start(name, daemon=False):
    threading.Thread(target=time.sleep, args=(600,), name=name, daemon=daemon).start()

def wait():
    time.sleep(600)

fork = multiprocessing.get_context("fork")
start("daemon", daemon=True)
pool = ThreadPoolExecutor()
pool.submit(int).result()
if sys.argv[1:]:
    processes = [subprocess.Popen(["sleep", "600"]), fork.Process(target=wait)]
    processes[1].start()
    start("watcher")
    print(*[process.pid for process in processes])
    system.LEFTOVERS_S = 0.1
system.exit_in_time(7)
"""


def test_a_process_ends_without_what_user_code_has_left_and_names_it(tmp_path: Path) -> None:
    """Not daemons and idle pools, which Python ends itself."""
    command = [sys.executable, "-c", LEAVING]
    clean = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    ended = subprocess.run([*command, "leave"], cwd=tmp_path, capture_output=True, text=True, timeout=60)

    assert (clean.returncode, clean.stderr) == (7, "")
    assert ended.returncode == 7, ended.stderr
    program, process = ended.stdout.split()
    assert "were killed: watcher, sleep (" in ended.stderr
    assert all(f"({pid})" in ended.stderr for pid in (program, process))
    eventually(lambda: not any(_is_running(int(pid)) for pid in (program, process)))  # SIGKILL takes a moment


def _is_running(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
