"""Damaged journals, stores and answers: every command says so in a sentence; none shows a traceback or writes there."""

# promise: no file, command line or journal ends in a traceback

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import damage
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import finished, spread

from pipeline.cli import comparison
from pipeline.commands.list import list_runs
from pipeline.commands.show import show
from pipeline.drive.resume import changes, earlier
from pipeline.errors import PipelineError
from pipeline.experiment.load import load, to_yaml
from pipeline.experiment.schema import Experiment
from pipeline.protocol.events import Metrics, Point, RunClosed, RunOpened, TrialOpened, event_to_json
from pipeline.record import journal
from pipeline.record.folder import ENVIRONMENT_NAME, EXPERIMENT_NAME
from pipeline.record.journal import FILE_NAME
from pipeline.record.runs import LATEST
from pipeline.results.record import FILE_NAME as RESULT_NAME
from pipeline.results.record import Fact, Result, Table
from pipeline.tracking.store import check_store, resolve_uri
from pipeline.train.storage import Manifest, StoredFile, parse

BEGAN = 1_772_366_400.0
EVENTS = [
    RunOpened(
        time=BEGAN, run="a", tracking_uri="sqlite:///m.db", tracking_experiment="digits",
        tags={"role": "main", "strategy": "ddp", "world_size": "2"}, params={"name": "digits"}, trials=("main",),
    ),
    TrialOpened(time=BEGAN, role="main", title="ddp, 2 workers", tags={}, params={}),
    Metrics(time=BEGAN + 1, step=1, epoch=1, points=(Point("train/loss", 1, 0.5), Point("speedup", 1, 1.5))),
    finished("main", spread(100)),
    RunClosed(time=BEGAN + 60, status="FINISHED"),
]  # fmt: skip
JOURNAL = b"".join(event_to_json(event) + b"\n" for event in EVENTS)
RESULT = (
    Result(
        kind="run", name="digits", title="digits: training completed", headline=("2x as fast",), verdict="2x as fast",
        facts=(Fact(key="speedup", value=2.0, low=1.9, high=2.1, unit="x"),),
        tables=(Table(header=("a",), rows=(("1",),)),),
    )
    .model_dump_json().encode()
)  # fmt: skip

SLOW = [HealthCheck.too_slow]  # this machine may be busy with something else
UNFINISHED = b"".join(event_to_json(event) + b"\n" for event in EVENTS[:-1])
LAB = (Path(__file__).parents[1] / "project" / "lab.yaml").read_text().replace("name: lab", "name: digits")
WRITTEN = to_yaml(Experiment.model_validate(yaml.safe_load(LAB))).encode()
ENVIRONMENT = b"# Python 3.11, Linux\ntorch==2.13.0\nray==2.60.0\n"
MANIFEST = (
    Manifest(
        step=3, epoch=1, steps_per_epoch=3, global_batch_size=4, world_size=2, time=BEGAN, versions={"torch": "2"},
        experiment={"seed": 1, "lr": [0.1, None]}, data_digest="a", files=(StoredFile(name="x", size=1, sha256="a"),),
    )
    .seal().model_dump_json().encode()
)  # fmt: skip


def _store() -> bytes:
    with TemporaryDirectory() as folder:
        with closing(sqlite3.connect(f"{folder}/m.db")) as database, database:
            database.execute("CREATE TABLE runs (name TEXT)")
            database.executemany("INSERT INTO runs VALUES (?)", [(str(n),) for n in range(2000)])
        return Path(folder, "m.db").read_bytes()


STORE = _store()
numbers = st.sampled_from([0, -1, 10**30, -(10**30), 1e308, float("inf"), float("nan"), 253402300800.0, -62135596801.0])
leaves = (
    st.none()
    | st.booleans()
    | numbers
    | st.sampled_from(["", "x", "\x1b[31m", "[bold]", "[/]", "é" * 300, "-1", "1e9"])
)
odd = (
    leaves | st.lists(leaves, max_size=2) | st.dictionaries(st.sampled_from(["kind", "a", "role"]), leaves, max_size=2)
)
SNIPPETS = [
    b"", b"\n", b"\r\n", b"\x00", b"\xff\xfe", b"{}\n", b"[]\n", b"null\n", b"1\n", b'{"kind":"run_opened"}\n',
    b"}", b'"', b"[",
]  # fmt: skip
SNIPPETS += [b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"\xef\xbb\xbf", b"\\ud800", b"\n\n\n", b" " * 3000]


KINDS = ["insert", "flip", "cut", "repeat", "end", "start"]


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Bytes flipped, cut out, put in; the end missing."""
    return damage.damaged(draw, whole, kinds=KINDS, snippets=SNIPPETS, most=3, longest=300)


def changed(draw: st.DrawFn, document: Any) -> Any:
    """With another value somewhere, or without it."""
    places = list(damage.places_in(document))
    if not places:
        return document
    *section, name = draw(st.sampled_from(places))
    inside = document
    for part in section:
        inside = inside[part]
    if draw(st.booleans()):
        inside[name] = draw(odd)
    else:
        del inside[name]
    return document


@st.composite
def changed_lines(draw: st.DrawFn) -> bytes:
    """Whole lines of JSON that say something else, in another order, twice, or not at all."""
    lines = [json.loads(line) for line in JOURNAL.splitlines()]
    lines = draw(st.permutations(lines) | st.just(lines) | st.lists(st.sampled_from(lines), max_size=6))
    lines = json.loads(json.dumps(lines))
    for _ in range(draw(st.integers(0, 3))):
        if lines:
            changed(draw, draw(st.sampled_from(lines)))
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@st.composite
def changed_result(draw: st.DrawFn) -> bytes:
    return json.dumps(changed(draw, draw(st.builds(json.loads, st.just(RESULT))))).encode()


@st.composite
def changed_manifest(draw: st.DrawFn) -> bytes:
    document = draw(st.builds(json.loads, st.just(MANIFEST)))
    return json.dumps(changed(draw, document)).encode()


journals = damaged(JOURNAL) | changed_lines() | st.binary(max_size=40)
results = damaged(RESULT) | changed_result() | st.just(RESULT)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One for all examples of a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("damaged"))
        yield Path.cwd()


def run(name: str, lines: bytes, result: bytes | None = RESULT) -> Path:
    folder = Path("runs") / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE_NAME).write_bytes(lines)
    if result is not None:
        (folder / RESULT_NAME).write_bytes(result)
    return folder


def said(look: Callable[[], object]) -> bool:
    """Whether a command ended well; if not, it says why. Anything else than our errors fails the test."""
    code, message = 0, ""
    try:
        look()
    except PipelineError as error:
        code, message = error.exit_code, str(error)
    assert code in (0, 2, 3)
    assert bool(code) == bool(message.strip())
    return not code


def everything(folder: Path = Path()) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@settings(deadline=None, max_examples=damage.examples(100), suppress_health_check=SLOW)
@given(journals, results, damaged(ENVIRONMENT))
def test_looking_back(lines: bytes, damaged_result: bytes, environment: bytes) -> None:
    shutil.rmtree("runs", ignore_errors=True)
    run("20260101-a", JOURNAL)
    (run("20260102-b", lines, damaged_result) / ENVIRONMENT_NAME).write_bytes(environment)
    before = everything()
    for as_json in (False, True):
        list_runs(as_json=as_json)
        said(partial(show, "20260102", as_json=as_json))
        said(partial(comparison.compare, ["20260101", "20260102"], as_json=as_json))
    assert everything() == before


@settings(deadline=None, max_examples=damage.examples(120), suppress_health_check=SLOW)
@given(st.just(UNFINISHED) | damaged(UNFINISHED) | journals, st.just(WRITTEN) | damaged(WRITTEN), st.booleans())
def test_what_resume_asks_first(lines: bytes, experiment: bytes, newest: bool) -> None:
    """All that `run --resume` reads before it writes; a whole run shows that it can be had."""
    Path("lab.yaml").write_text(LAB)
    file = load("lab.yaml")
    shutil.rmtree("runs", ignore_errors=True)
    (run("20260102-digits-b", lines, None) / EXPERIMENT_NAME).write_bytes(experiment)
    before = everything()

    def resume() -> None:
        state = earlier(file, LATEST if newest else "20260102")
        changes(file, state, allowed=True)

    could = said(resume)
    assert could or (lines, experiment) != (UNFINISHED, WRITTEN)
    assert everything() == before


@settings(deadline=None, max_examples=damage.examples(300))
@given(damaged(UNFINISHED) | journals)
def test_a_journal_that_was_opened_again_has_no_torn_line(content: bytes) -> None:
    Path("again.jsonl").write_bytes(content)
    with closing(journal.Journal(Path("again.jsonl"))) as opened:
        opened.append(EVENTS[0])

    kept = Path("again.jsonl").read_bytes()
    assert kept.endswith(event_to_json(EVENTS[0]) + b"\n")
    assert content.startswith(kept.removesuffix(event_to_json(EVENTS[0]) + b"\n"))


@settings(deadline=None, max_examples=damage.examples(300))
@given(damaged(STORE))
def test_a_damaged_store_is_refused_or_opens(content: bytes) -> None:
    Path("m.db").write_bytes(content)
    said(partial(check_store, resolve_uri("sqlite:///m.db", base=Path.cwd())))
    assert Path("m.db").read_bytes() == content
    Path("m.db").unlink()


@settings(deadline=None, max_examples=damage.examples(500))
@given(damaged(MANIFEST) | changed_manifest())
def test_a_manifest_is_whole_or_none(content: bytes) -> None:
    found = parse(content)
    assert found is None or found == parse(MANIFEST)
