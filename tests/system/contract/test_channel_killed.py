"""A worker whose driver is killed ends by itself."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = """
import sys
from pathlib import Path
from pipeline.protocol.channel import Inbox

with Inbox(host="127.0.0.1", receive=lambda event, _: print(event.message, flush=True)) as inbox:
    print(inbox.address, flush=True)
    sys.stdin.read()
"""

WORKER = """
import sys, threading
from pathlib import Path
from pipeline.protocol.channel import Address, ChannelOutbox
from pipeline.protocol.events import Warned

with ChannelOutbox(Address.parse(sys.argv[1].strip()), rank=0, folder=Path()) as outbox:
    outbox.event(Warned(time=0, message="training"))
    if sys.argv[2] == "busy":
        while True:
            pass
    threading.Event().wait()
"""


@pytest.mark.parametrize("state", ["busy", "waiting"])
def test_a_worker_whose_driver_is_killed_ends_itself(tmp_path: Path, state: str) -> None:
    def start(code: str, *arguments: str) -> "subprocess.Popen[str]":
        line = [sys.executable, "-c", code, *arguments]
        return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with start(DRIVER, str(tmp_path)) as driver:
        assert driver.stdout is not None
        address = driver.stdout.readline()
        with start(WORKER, address, state) as worker:
            assert driver.stdout.readline() == "training\n"
            assert worker.poll() is None
            os.kill(driver.pid, signal.SIGKILL)
            try:
                assert worker.wait(timeout=30) == 1
            finally:
                worker.kill()
