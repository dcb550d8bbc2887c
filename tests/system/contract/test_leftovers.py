"""Threads and processes that user code has left when a command ends."""

# promise: user code leaves threads or processes: the command ends and names them

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

LEAVING = """
import multiprocessing, subprocess, sys, threading, time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pipeline import system

def start(name, daemon=False):
    threading.Thread(target=time.sleep, args=(600,), name=name, daemon=daemon).start()

def wait():
    time.sleep(600)

fork = multiprocessing.get_context("fork")
earlier = subprocess.Popen(["sleep", "600"])
found = system.Leftovers()
start("daemon", daemon=True)
pool = ThreadPoolExecutor()
pool.submit(print, "idle", flush=True).result()
of_processes = ProcessPoolExecutor(1, mp_context=fork)
of_processes.submit(int).result()
found.end(print)
system.LEFTOVERS_S = 0.1
processes = [subprocess.Popen(["sleep", "600"]), fork.Process(target=wait), fork.Process(target=wait, daemon=True)]
for process in processes[1:]:
    process.start()
manager = fork.Manager()
start("watcher")
print(earlier.pid, *[process.pid for process in processes])
found.end(print)
earlier.kill()
system.exit_in_time(7)
"""


def test_a_process_ends_without_what_user_code_has_left_and_names_it(tmp_path: Path) -> None:
    """Not daemons, idle pools, and a manager, which Python ends itself, nor what ends soon or was there before."""
    ended = subprocess.run([sys.executable, "-c", LEAVING], cwd=tmp_path, capture_output=True, text=True, timeout=60)

    assert ended.returncode == 7, ended.stderr
    idle, pids, of_processes, of_threads = ended.stdout.splitlines()
    earlier, program, process, daemon = pids.split()
    assert idle == "idle"
    assert f" 0.1 s: sleep ({program}). They were killed." in of_processes
    assert earlier not in of_processes
    assert f"({process})" in ended.stderr
    assert "still running after 0.1 s: watcher." in of_threads
    assert not any(_is_running(int(pid)) for pid in (program, process, daemon))


def _is_running(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
