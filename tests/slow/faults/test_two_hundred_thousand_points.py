"""A long run through an outage of the server and kills of the process that sends it: each point once in the store."""

# promise: 200,000 points through an outage and two kills are in the store, each once

import os
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from stores import Server

from pipeline.protocol.events import Metrics, Point, RunClosed, RunOpened
from pipeline.record.recorder import Recorder
from pipeline.tracking.follow import sync
from pipeline.tracking.follower import Follower

POINTS = int(os.environ.get("POINTS", "200000"))
NAMES = 20
PAUSE_S = 0.002


@pytest.mark.timeout(1800)
def test_each_point_is_there_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, folder = Server(tmp_path), tmp_path / "runs" / "long"
    folder.mkdir(parents=True)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "120")
    tags = {"strategy": "single", "world_size": "1"}
    opened = RunOpened(run="long", tracking_uri=server.uri, tracking_experiment="long", tags=tags, params={}, trials=())
    told: list[str] = []
    with closing(Recorder(folder, subscribers=[])) as recorder:  # the server is down
        follower = Follower(folder, uri=server.uri, warn=told.append)
        recorder.receive(opened)
        recorder.receive(metrics(0))
        wait_until(lambda: any("doesn't accept results" in text for text in told))
        server.start()
        killed = 0
        for step in range(1, POINTS // NAMES):
            recorder.receive(metrics(step))
            time.sleep(PAUSE_S)
            if step % (POINTS // NAMES // 3) == 0 and killed < 2:
                wait_until(lambda: count(tmp_path) > 0)
                follower._process.kill()
                assert follower.finish(60)
                follower.close()
                killed += 1
                if killed == 1:
                    server.kill()
                    server.start()
                follower = Follower(folder, uri=server.uri, warn=told.append)
        recorder.receive(RunClosed(status="FINISHED"))
        follower.receive(RunClosed(status="FINISHED"))
        follower.finish(timeout_s=5)
        follower.close()
    began = time.monotonic()
    outcome = sync(folder, warn=told.append)
    for _ in range(10):  # a busy machine's server may take longer than the few attempts of one command
        if outcome.delivered:
            break
        outcome = sync(folder, warn=told.append)
    sys.stderr.write(f"\n{POINTS:,} points, {killed} kills; {time.monotonic() - began:.0f} s of sync; {told}\n")
    server.kill()
    assert outcome.delivered
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        (there,) = database.execute("SELECT count(*) FROM metrics").fetchone()
        rows = Counter(database.execute("SELECT key, step FROM metrics"))
        (runs,) = database.execute("SELECT count(*) FROM runs").fetchone()
    assert (there, len(rows), max(rows.values()), runs) == (POINTS, POINTS, 1, 1)
    assert not [each for each in psutil.Process().children(recursive=True) if "tracking.follow" in str(each.cmdline())]


def metrics(step: int) -> Metrics:
    points = tuple(Point(f"train/loss_{n}", step, 1 / (step + 1)) for n in range(NAMES))
    return Metrics(step=step, epoch=1, points=points)


def count(lab: Path) -> int:
    with closing(sqlite3.connect(f"file:{lab}/mlflow.db?mode=ro", uri=True)) as database:
        return int(database.execute("SELECT count(*) FROM metrics").fetchone()[0])


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
