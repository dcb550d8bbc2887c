"""Runs by what their journals say: which there are, which one is meant, what sets two of them apart."""

# promise: `latest` and `--resume` never take an older run in silence
# promise: a run without a step is neither listed nor sent

from collections.abc import Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from samples import finished, spread

from pipeline.commands.list import format_age, format_runs
from pipeline.commands.options import summary_of
from pipeline.errors import UsageError
from pipeline.protocol.events import WEIGHTS, Metrics, Point, RunClosed, RunOpened
from pipeline.protocol.trial import Status
from pipeline.record import runs
from pipeline.record.journal import FILE_NAME
from pipeline.record.recorder import Recorder
from pipeline.record.runs import summarize_run
from pipeline.results.record import Fact, Result, save

BEGAN = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()


DDP = {"role": "main", "strategy": "ddp", "world_size": "2"}
QUICK = {**DDP, "quick": "true"}


def opened(name: str, *, params: Mapping[str, str] = {"name": "digits"}, tags: Mapping[str, str] = DDP) -> RunOpened:
    return RunOpened(
        time=BEGAN, run=name, tracking_uri="sqlite:///m.db", tracking_experiment="digits", tags=tags, params=params,
        trials=("main",),
    )  # fmt: skip


def run(
    directory: Path,
    name: str,
    *,
    status: Status | None = "FINISHED",
    message: str = "why",
    speedup: float | None = 1.5,
    interval: tuple[float, float] = (1.4, 1.6),
    metrics: Mapping[str, float] | None = None,
    rate: float = 100,
    **own: Mapping[str, str],
) -> Path:
    folder = directory / name
    folder.mkdir(parents=True)
    with closing(Recorder(folder, subscribers=[])) as recorder:
        recorder.receive(opened(name, **own))
        points = (Point("train/loss", 1, 0.5),)
        recorder.receive(Metrics(time=BEGAN + 1, step=1, epoch=1, points=points))
        recorder.receive(finished("main", spread(rate), metrics=metrics or {}))
        if speedup is not None:
            low, high = interval
            figures = {"speedup": speedup, "efficiency": speedup / 2, "speedup_ci_low": low, "speedup_ci_high": high}
            figures |= {"speedup_rounds": 6}
            points = tuple(Point(name, 9, value) for name, value in figures.items())
            recorder.receive(Metrics(time=BEGAN + 2, step=9, epoch=1, points=points))
        if status is not None:
            recorder.receive(RunClosed(time=BEGAN + 60, status=status, message="" if status == "FINISHED" else message))
    return folder


def shown(width: int | None, directory: Path, *, ago_s: float = 7200) -> list[str]:
    now = datetime.fromtimestamp(BEGAN + ago_s, UTC)
    return str(format_runs(list(runs.summaries(directory)), now=now, width=width)).splitlines()


def test_a_summary_says_what_the_journal_says(tmp_path: Path) -> None:
    run(tmp_path, "20260301-120000-digits-aaaa")
    run(tmp_path, "20260301-110000-digits-benchmark-bbbb", tags={"role": "benchmark"}, speedup=None)
    run(tmp_path, "20260301-100000-digits-cccc", status="FAILED")
    run(tmp_path, "20260301-090000-digits-dddd", status=None)
    (tmp_path / "20260301-130000-empty-eeee").mkdir()
    (tmp_path / "20260301-130000-empty-eeee" / FILE_NAME).touch()

    killed, failed, compared, newest = runs.summaries(tmp_path)

    assert (newest.command, newest.what, newest.status) == ("run", "ddp, 2 workers", "FINISHED")
    assert (newest.speedup, newest.efficiency) == (1.5, 0.75)
    assert (newest.speedup_ci_low, newest.speedup_ci_high, newest.speedup_rounds) == (1.4, 1.6, 6)
    assert (newest.samples_per_second, newest.seconds) == (100, 60)
    assert newest.ended is not None
    assert (newest.ended - newest.began).total_seconds() == 60
    assert (compared.command, compared.what, compared.speedup) == ("benchmark", "benchmark", None)
    assert (failed.status, failed.message) == ("FAILED", "why")
    assert (killed.status, killed.ended) == ("KILLED", None)


def test_a_trial_that_was_stopped_early_and_a_quick_test_are_called_that(tmp_path: Path) -> None:
    trial = summarize_run(run(tmp_path, "trial-002", status="KILLED", message="stopped early by ASHA after epoch 3"))
    assert trial is not None
    assert (trial.status, trial.message) == ("STOPPED", "stopped early by ASHA after epoch 3")
    quick = summarize_run(run(tmp_path, "quick", tags=QUICK, speedup=None, metrics={"validation/accuracy": 0.1}))
    assert quick is not None
    assert (quick.what, quick.metrics, quick.samples_per_second) == ("quick test: ddp, 2 workers", {}, None)


def test_a_run_is_running_while_its_journal_is_open_and_a_damaged_line_does_not_hide_it(tmp_path: Path) -> None:
    folder = run(tmp_path, "20260301-120000-digits-aaaa", status=None)
    with closing(Recorder(folder, subscribers=[])):
        (summary,) = runs.summaries(tmp_path)
        assert (summary.status, summary.ended) == ("RUNNING", None)
    lines = (folder / FILE_NAME).read_bytes().splitlines(keepends=True)
    (folder / FILE_NAME).write_bytes(lines[0] + b'{"speedup": oh no}\n' + b"".join(lines[1:]))
    (summary,) = runs.summaries(tmp_path)
    assert (summary.status, summary.speedup) == ("KILLED", 1.5)

    (folder / FILE_NAME).write_bytes(b"{}\n" + b"".join(lines[1:]))
    with pytest.raises(UsageError, match=r"events\.jsonl:1: this line is damaged\. Remove the run"):
        summary_of(folder.name, tmp_path)


LONG = "20260301-110000-a-long-name-of-an-experiment-bbbb"


def long_and_short(directory: Path) -> None:
    metrics = {"validation/loss": 0.03347, "validation/accuracy": 0.98611}
    long = run(directory, LONG, params={"name": "a-long-name-of-an-experiment"}, metrics=metrics, rate=18468.3)
    save_speedup(long, value=1.5, low=1.4, high=1.6)
    short = run(directory, "20260301-120000-digits-aaaa", status=None)
    save_speedup(short, value=1.01, low=0.93, high=1.09, state="inconclusive")


def save_speedup(folder: Path, **known: Any) -> None:
    fact = Fact(key="speedup", unit="x", **known)
    save(Result(kind="run", name="digits", title="t", headline=(), verdict="v", facts=(fact,)), folder)


def test_a_list_has_a_line_for_each_run_and_the_columns_that_there_is_room_for(tmp_path: Path) -> None:
    long_and_short(tmp_path)
    assert shown(200, tmp_path) == [
        "run                                                  status           metric       speedup  samples/s   "
        "duration    began            what                    experiment",
        "20260301-110000-a-long-name-of-an-experiment-bbbb  FINISHED  accuracy 0.9861         1.50x     18,468  "
        "1 min 0 s  2 h ago  ddp, 2 workers  a-long-name-of-an-experiment",
        "20260301-120000-digits-aaaa                          KILLED                -  inconclusive        100"
        "          -  2 h ago  ddp, 2 workers                        digits",
    ]
    assert shown(None, tmp_path) == shown(200, tmp_path)  # a pipe is as wide as it needs to be
    assert shown(140, tmp_path)[1].endswith("  2 h ago  ddp, 2 workers")
    assert shown(80, tmp_path)[1].split() == [LONG, "FINISHED", "accuracy", "0.9861"]
    assert shown(20, tmp_path)[1] == f"{LONG}  FINISHED"  # an id is never cut


def test_a_speedup_is_shown_as_far_as_it_is_clear(tmp_path: Path) -> None:
    folder = run(tmp_path, "20260301-120000-digits-aaaa")
    save_speedup(folder, value=0.34, low=0.17, high=0.71)
    assert "  0.17x to 0.71x  " in shown(200, tmp_path)[1]
    facts = {"ok": "1.84x", "inconclusive": "inconclusive", "invalid": "not valid"}
    for state, text in facts.items():
        save_speedup(folder, value=1.84, low=1.7, high=1.9, state=state)
        assert f"  {text}  " in shown(200, tmp_path)[1]


def test_a_terminal_shows_no_column_without_values(tmp_path: Path) -> None:
    run(tmp_path, "20260301-120000-digits-aaaa", speedup=None)
    assert shown(100, tmp_path)[0].split() == [
        "run", "status", "samples/s", "duration", "began", "what", "experiment"
    ]  # fmt: skip
    assert "speedup" in shown(None, tmp_path)[0]


def test_a_killed_run_has_the_metrics_of_its_last_evaluation(tmp_path: Path) -> None:
    folder = tmp_path / "20260301-120000-digits-aaaa"
    folder.mkdir()
    params = {"name": "digits", "metrics.accuracy._target_": "torchmetrics.Accuracy"}
    with closing(Recorder(folder, subscribers=[])) as recorder:
        recorder.receive(opened(folder.name, params=params))
        for epoch in (1, 2):
            points = (Point("validation/accuracy", epoch, epoch / 4), Point("train/loss", epoch, 1.0))
            recorder.receive(Metrics(time=BEGAN + epoch, step=epoch, epoch=epoch, points=points))
    (summary,) = runs.summaries(tmp_path)
    assert (summary.metric, summary.metrics) == ("validation/accuracy", {"validation/accuracy": 0.5})


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0 s ago"), (59, "59 s ago"), (60, "1 min ago"), (7199, "1 h ago"), (90000, "1 d ago")]
)
def test_how_long_ago(seconds: float, text: str) -> None:
    assert format_age(seconds) == text


def test_a_run_is_found_by_a_part_of_its_id_by_its_folder_and_as_the_latest(tmp_path: Path) -> None:
    old = run(tmp_path, "20260301-110000-digits-bbbb")
    new = run(tmp_path, "20260302-120000-digits-aaaa")
    trial = run(new, "trial-002")

    assert runs.find("latest", tmp_path) == runs.find("20260302", tmp_path) == runs.find("aaa", tmp_path) == new
    assert runs.find("aaaa/trial-002", tmp_path) == runs.find("latest/trial-002", tmp_path) == trial
    assert runs.find(old.name, tmp_path) == runs.find(str(old), Path("elsewhere")) == old


def test_a_run_that_ended_before_its_first_step_is_not_listed_but_the_latest(tmp_path: Path) -> None:
    good = run(tmp_path, "20260301-110000-digits-bbbb")
    bad = tmp_path / "20260302-120000-digits-aaaa"
    bad.mkdir()
    with closing(Recorder(bad, subscribers=[])) as recorder:
        recorder.receive(opened(bad.name))
        assert [summary.folder for summary in runs.summaries(tmp_path)] == [good, bad]  # it is running
        recorder.receive(RunClosed(status="FAILED", message="wrong"))

    assert [summary.folder for summary in runs.summaries(tmp_path)] == [good]
    assert [summary.folder for summary in runs.summaries(tmp_path, with_unstarted=True)] == [good, bad]
    assert runs.find("latest", tmp_path) == runs.find("aaaa", tmp_path) == bad
    note = f"latest is {good.name}. The newer run {bad.name} failed."
    assert runs.find_trained("latest", tmp_path) == (good, note)
    (bad / FILE_NAME).write_bytes(b"damaged\n" + (bad / FILE_NAME).read_bytes())
    for find in (runs.find, runs.find_trained):  # neither takes an older run in silence
        with pytest.raises(UsageError, match=r"events\.jsonl:1: this line is damaged"):
            find("latest", tmp_path)


def test_the_latest_trained_run_is_the_newest_that_completed_a_whole_training(tmp_path: Path) -> None:
    short = run(tmp_path, "20260301-1-digits-aaaa", tags=QUICK)
    failed = run(tmp_path, "20260301-2-digits-bbbb", status="FAILED")
    with pytest.raises(UsageError, match=r"no training in .* has completed; .* Train: pipeline run FILE$"):
        runs.find_trained("latest", tmp_path)
    (short / "model").mkdir()
    (short / WEIGHTS).touch()
    with pytest.raises(UsageError, match=rf"Name a run\. The newest with a model is {short.name}\."):
        runs.find_trained("latest", tmp_path)

    good = run(tmp_path, "20260301-3-digits-cccc")
    run(tmp_path, "20260301-4-digits-dddd", tags=QUICK, status="KILLED")
    newest = run(tmp_path, "20260301-5-digits-compare-eeee", tags={"role": "compare"})
    assert runs.find_trained("latest", tmp_path) == (good, "")
    assert runs.find("latest", tmp_path) == newest
    assert runs.find_trained("bbbb", tmp_path) == (failed, "")

    run(tmp_path, "20260301-6-digits-ffff", status="FAILED")
    killed = run(tmp_path, "20260301-7-digits-gggg", status=None)
    note = f"latest is {good.name}. The newer run {killed.name} was killed."
    assert runs.find_trained("latest", tmp_path) == (good, note)
    with closing(Recorder(killed, subscribers=[])):
        assert runs.find_trained("latest", tmp_path).note.endswith("gggg is still running.")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2026", "2026: 2 runs match. Write more of one of these ids: 20260301-110000-digits-bbbb, 20260302-1200"),
        ("digits", "digits: 2 runs match. Write more of one of these ids: 20260301-110000-digits-bbbb, "),
        ("aaaa/trial-003", "aaaa/trial-003: no such run in "),
        ("20260301-110000-digit-bbbb", "no such run in .*; did you mean 20260301-110000-digits-bbbb"),
        ("x", "x: no such run in .*. The latest runs are 20260301-110000-digits-bbbb, 20260302-120000-digits-aaaa"),
    ],
)
def test_an_unknown_run_is_answered_with_the_nearest_ones(tmp_path: Path, text: str, said: str) -> None:
    run(tmp_path, "20260301-110000-digits-bbbb")
    run(tmp_path, "20260302-120000-digits-aaaa")
    with pytest.raises(UsageError, match=said):
        runs.find(text, tmp_path)
    with pytest.raises(UsageError, match=r"latest: no such run in .* \(no runs yet\)"):
        runs.find("latest", tmp_path / "runs")
