"""Runs by what their journals say: which there are, which one is meant, what sets two of them apart."""

import io
from collections.abc import Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
import rich.console
from samples import finished, report, spread

from pipeline.commands.history.difference import difference, show_difference
from pipeline.commands.history.run_result import ago, show_runs
from pipeline.errors import UsageError
from pipeline.protocol.events import Metrics, Point, RunClosed, RunOpened
from pipeline.protocol.trial import Status
from pipeline.recording import runs
from pipeline.recording.journal import FILE_NAME
from pipeline.recording.recorder import Recorder
from pipeline.report.publish import REPORT_NAME

BEGAN = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()


def run(
    directory: Path,
    name: str,
    *,
    status: Status | None = "FINISHED",
    message: str = "why",
    speedup: float | None = 1.5,
    params: Mapping[str, str] = {"name": "digits"},
    tags: Mapping[str, str] = {"role": "main", "strategy": "ddp", "world_size": "2"},
) -> Path:
    folder = directory / name
    folder.mkdir(parents=True)
    opened = RunOpened(
        time=BEGAN, run=name, tracking_uri="sqlite:///m.db", tracking_experiment="digits", tags=tags, params=params,
        trials=("main",),
    )  # fmt: skip
    with closing(Recorder(folder, subscribers=[])) as recorder:
        recorder.receive(opened)
        points = (Point("train/loss", 1, 0.5),)
        recorder.receive(Metrics(time=BEGAN + 1, step=1, epoch=1, points=points))
        recorder.receive(finished("main", spread(100)))
        if speedup is not None:
            figures = (Point("speedup", 9, speedup), Point("efficiency", 9, speedup / 2))
            recorder.receive(Metrics(time=BEGAN + 2, step=9, epoch=1, points=figures))
        if status is not None:
            recorder.receive(RunClosed(time=BEGAN + 60, status=status, message="" if status == "FINISHED" else message))
    return folder


def console_of(width: int, *, is_terminal: bool = True) -> rich.console.Console:
    return rich.console.Console(file=io.StringIO(), width=width, force_terminal=is_terminal, color_system=None)


def shown(width: int, directory: Path, *, ago_s: float = 7200, is_terminal: bool = True) -> list[str]:
    console = console_of(width, is_terminal=is_terminal)
    now = datetime.fromtimestamp(BEGAN + ago_s, UTC)
    show_runs(list(runs.summaries(directory)), now=now, console=console)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_summary_says_what_the_journal_says(tmp_path: Path) -> None:
    run(tmp_path, "20260301-120000-digits-aaaa")
    run(tmp_path, "20260301-110000-digits-compare-bbbb", tags={"role": "compare"}, speedup=None)
    run(tmp_path, "20260301-100000-digits-cccc", status="FAILED")
    run(tmp_path, "20260301-090000-digits-dddd", status=None)
    (tmp_path / "20260301-130000-empty-eeee").mkdir()
    (tmp_path / "20260301-130000-empty-eeee" / FILE_NAME).touch()

    killed, failed, compared, newest = runs.summaries(tmp_path)

    assert (newest.command, newest.what, newest.status) == ("run", "ddp x 2", "FINISHED")
    assert (newest.speedup, newest.efficiency) == (1.5, 0.75)
    assert newest.ended is not None
    assert (newest.ended - newest.began).total_seconds() == 60
    assert (compared.command, compared.what, compared.speedup) == ("compare", "compare", None)
    assert (failed.status, failed.message) == ("FAILED", "why")
    assert (killed.status, killed.ended) == ("KILLED", None)


def test_a_trial_that_was_stopped_early_is_called_that(tmp_path: Path) -> None:
    trial = run(tmp_path, "trial-002", status="KILLED", message="stopped early by ASHA after epoch 3")
    summary = runs.summarized(trial)
    assert summary is not None
    assert (summary.status, summary.message) == ("STOPPED", "stopped early by ASHA after epoch 3")


def test_a_run_is_running_while_its_journal_is_open(tmp_path: Path) -> None:
    folder = run(tmp_path, "20260301-120000-digits-aaaa", status=None)
    with closing(Recorder(folder, subscribers=[])):
        (summary,) = runs.summaries(tmp_path)
        assert (summary.status, summary.ended) == ("RUNNING", None)
    (summary,) = runs.summaries(tmp_path)
    assert summary.status == "KILLED"


def test_a_damaged_line_does_not_hide_a_run(tmp_path: Path) -> None:
    folder = run(tmp_path, "20260301-120000-digits-aaaa")
    lines = (folder / FILE_NAME).read_bytes().splitlines(keepends=True)
    (folder / FILE_NAME).write_bytes(lines[0] + b'{"speedup": oh no}\n' + b"".join(lines[1:]))
    (summary,) = runs.summaries(tmp_path)
    assert (summary.status, summary.speedup) == ("FINISHED", 1.5)


def test_the_table_fits_80_columns_and_loses_the_experiment_first(tmp_path: Path) -> None:
    run(tmp_path, "20260301-110000-a-long-name-of-an-experiment-bbbb", params={"name": "a-long-name-of-an-experiment"})
    run(tmp_path, "20260301-120000-digits-aaaa", status="KILLED", speedup=None)

    assert shown(80, tmp_path) == [
        "run                                                what     status    speedup  began",
        "20260301-110000-a-long-name-of-an-experiment-bbbb  ddp x 2  FINISHED    1.50x  2 h ago",
        "20260301-120000-digits-aaaa                        ddp x 2  KILLED          -  2 h ago",
    ]
    assert "  experiment " in shown(140, tmp_path)[0]
    assert shown(20, tmp_path) == shown(80, tmp_path)  # nothing is cut
    assert shown(80, tmp_path, is_terminal=False) == shown(140, tmp_path)  # a pipe is as wide as it needs to be


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0 s ago"), (59, "59 s ago"), (60, "1 min ago"), (7199, "1 h ago"), (90000, "1 d ago")]
)
def test_how_long_ago(seconds: float, text: str) -> None:
    assert ago(seconds) == text


def test_a_run_is_found_by_a_part_of_its_id_by_its_folder_and_as_the_latest(tmp_path: Path) -> None:
    old = run(tmp_path, "20260301-110000-digits-bbbb")
    new = run(tmp_path, "20260302-120000-digits-aaaa")
    trial = run(new, "trial-002")

    assert runs.find("latest", tmp_path) == runs.find("20260302", tmp_path) == runs.find("aaa", tmp_path) == new
    assert runs.find("aaaa/trial-002", tmp_path) == runs.find("latest/trial-002", tmp_path) == trial
    assert runs.find(old.name, tmp_path) == runs.find(str(old), Path("elsewhere")) == old


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "2026",
            "2026: 2 runs match; write more of one of these ids: 20260301-110000-digits-bbbb, 20260302-120000-dig",
        ),
        ("digits", "digits: 2 runs match; write more of one of these ids: 20260301-110000-digits-bbbb, "),
        ("aaaa/trial-003", "aaaa/trial-003: no such run in "),
        ("20260301-110000-digit-bbbb", "no such run in .*; did you mean 20260301-110000-digits-bbbb"),
        ("x", "x: no such run in .*; the newest are 20260301-110000-digits-bbbb, 20260302-120000-digits-aaaa"),
    ],
)
def test_an_unknown_run_is_answered_with_the_nearest_ones(tmp_path: Path, text: str, said: str) -> None:
    run(tmp_path, "20260301-110000-digits-bbbb")
    run(tmp_path, "20260302-120000-digits-aaaa")
    with pytest.raises(UsageError, match=said):
        runs.find(text, tmp_path)


def test_where_there_are_no_runs_none_is_found(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"latest: no such run in .*it has no runs"):
        runs.find("latest", tmp_path / "runs")


def test_a_difference_holds_what_differs_and_nothing_else(tmp_path: Path) -> None:
    a = run(tmp_path, "20260301-110000-digits-bbbb", params={"name": "digits", "seed": "1", "train.epochs": "5"})
    b = run(tmp_path, "20260302-120000-digits-aaaa", params={"name": "digits", "seed": "1", "train.epochs": "9",
                                                           "model.depth": "3"}, status="FAILED")  # fmt: skip
    (a / "environment.txt").write_text("# python 3.11.7, Linux\nnumpy==2.3.4\ntorch==2.13.0\n")
    (b / "environment.txt").write_text("# python 3.11.7, Linux\nnumpy==2.4.0\ntorch==2.13.0\n")
    slow, fast = report(), report()
    main = fast.main.model_copy(update={"samples_per_second": spread(380)})
    (a / REPORT_NAME).write_text(slow.to_json())
    (b / REPORT_NAME).write_text(fast.model_copy(update={"rows": (*fast.rows[:-1], main)}).to_json())

    found = difference(*(summary for summary in runs.summaries(tmp_path)))

    assert {key: (pair.a, pair.b) for key, pair in found.configuration.items()} == {
        "train.epochs": ("5", "9"), "model.depth": (None, "3")
    }  # fmt: skip
    assert {key: (pair.a, pair.b) for key, pair in found.environment.items()} == {"numpy": ("2.3.4", "2.4.0")}
    assert set(found.results) == {"status", "message", "ddp x 2: samples/s"}
    assert found.results["ddp x 2: samples/s"].change == "+100.0%"
    for width in (80, 40):
        console = console_of(width)
        show_difference(found, console=console)
        assert isinstance(console.file, io.StringIO)
        text = console.file.getvalue()
        assert max(map(len, text.splitlines())) <= max(width, len("b  20260302-120000-digits-aaaa"))
        assert "+100.0%" in text
        assert "…" not in text


def test_a_report_of_another_version_does_not_hide_the_rest(tmp_path: Path) -> None:
    a = run(tmp_path, "20260301-110000-digits-bbbb")
    run(tmp_path, "20260302-120000-digits-aaaa")
    (a / REPORT_NAME).write_text('{"name": "digits"}')

    found = difference(*runs.summaries(tmp_path))

    assert "not a result of this version" in str(found.results["report"].a)
