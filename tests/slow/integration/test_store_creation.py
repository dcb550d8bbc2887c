"""MLflow's SQLite store is there whole or not at all: its creation killed, and two first runs at once."""

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, logging, os, sys
from pathlib import Path
import sqlalchemy
from mlflow import MlflowClient
from mlflow.store.tracking import sqlalchemy_store
from pipeline.tracking.store import check_store, create_store

logging.disable(logging.CRITICAL)
folder = Path(sys.argv[1])


def forked(call):
    pid = os.fork()
    if not pid:
        try:
            call()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return pid


def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def cut(uri, statements):
    left = iter(range(statements))

    def count(*_):
        if next(left, None) is None:
            os.kill(os.getpid(), 9)

    sqlalchemy.event.listen(sqlalchemy.Engine, "before_cursor_execute", count)
    Path.replace = lambda *_: os.kill(os.getpid(), 9)
    create_store(uri)


def use(uri):
    check_store(uri)
    create_store(uri)
    MlflowClient(uri, uri).create_experiment(str(os.getpid()))


found = []
for statements in map(int, sys.argv[2:]):
    place = folder / f"{statements}.db"
    uri = f"sqlite:///{place}"
    killed = ended(forked(lambda: cut(uri, statements)))
    there = [place.exists() and place.stat().st_size > 0, place.with_name(f"{place.name}.partial").exists()]
    first_runs = [forked(lambda: use(uri)) for _ in range(2)]
    found.append([killed, *there, *map(ended, first_runs), sorted(path.name for path in folder.glob(f"{place.name}*"))])
print(json.dumps(found))
"""


def test_a_creation_that_is_killed_leaves_nothing_in_its_place(tmp_path: Path) -> None:
    """Killed after so many SQL statements, the last time just before the rename; then two first runs begin at once."""
    cuts = [120, 300, 10**9]
    program = [sys.executable, "-c", PROGRAM, tmp_path, *map(str, cuts)]
    ended = subprocess.run(program, capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout) == [[-9, False, True, 0, 0, [f"{cut}.db"]] for cut in cuts], ended.stderr
