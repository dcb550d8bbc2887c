"""The page as a file: it needs nothing from outside and leaves nothing out, and it knows its run."""

# promise: a speedup that could be noise says what would resolve it, and has no color

import html
import re
from base64 import b64encode
from collections.abc import Iterator
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest
from samples import BASELINE, HARDWARE, MAIN, comparison, finished, in_turn, report, spread

from pipeline.protocol.trial_result import Best, Communication, StepParts
from pipeline.report.numbers.row import Advice
from pipeline.report.page import publish
from pipeline.report.page.about import About
from pipeline.report.page.html import Drawn, fragment, save_page
from pipeline.report.report import Report
from pipeline.results.goodput import Goodput


class References(HTMLParser):
    """Collects everything a browser would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]


UNKNOWN = About()
DRAWN = {
    "speedup.png": Drawn("<svg id='chart'/>", label=""),
    "pairs.png": Drawn("<svg id='pairs'/>", label=""),
    "learning_curves.png": Drawn("<svg id='curves'/>", label="", caption="smoothed"),
}


def page_of(result: Report, folder: Path, *, about: About = UNKNOWN, has_pictures: bool = False) -> str:
    save_page(result, folder / "report.html", about=about, pictures=DRAWN if has_pictures else {})
    return (folder / "report.html").read_text(encoding="utf-8")


def test_the_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    publish.save(report(), tmp_path, warn=pytest.fail)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    found = References()
    found.feed(page)
    assert found.addresses == []
    assert "svg" in found.tags
    assert not found.tags & {"script", "link", "iframe", "object", "img"}
    assert "http" not in page
    assert page.count("url(") == page.count("url(#")
    assert "@import" not in page


def figures_of(result: Report) -> Iterator[str]:
    for table in (result.results, result.step_parts, result.resources):
        yield from (cell for row in table.rows for cell in row)
        yield from table.notes


def test_the_page_shows_every_figure_and_remark(tmp_path: Path) -> None:
    page = page_of(report(), tmp_path)
    for text in (*figures_of(report()), *report().remarks, HARDWARE, "0.9735"):
        assert text in page


def test_the_page_shows_all_that_the_terminal_shows_below_the_tables(tmp_path: Path) -> None:
    exchange = Communication(ms=12.0, share=0.25)
    end = finished("main", spread(190.0), communication=21.5, metrics={"validation/accuracy": 0.9})
    end = end.model_copy(update={"result": end.result.model_copy(update={"communication": exchange})})
    shown = Report.of([MAIN, BASELINE], [end, finished("baseline", spread(100.0))], hardware=HARDWARE)
    page = html.unescape(page_of(shown, tmp_path)).lower()
    titles = [title for title, lines in shown.notes if lines]
    assert "Communication" in titles
    for lines in (shown.communication, shown.remarks, [shown.outcome]):
        assert all(line.lower() in page for line in lines)


HOSTILE = Advice(reason="<iframe>", change="write loader.x: <object>", key="loader.x")


def test_the_page_escapes_what_it_is_given(tmp_path: Path) -> None:
    hostile = report().model_copy(
        update={"name": "<script>alert(1)</script>", "remarks": ("<img src=x>",), "advice": (HOSTILE,)}
    )
    found = References()
    page = page_of(hostile, tmp_path)
    found.feed(page)
    assert not found.tags & {"script", "iframe", "object"}
    assert "x" not in found.addresses
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_the_page_of_a_bare_run_says_that_no_speedup_was_measured(tmp_path: Path) -> None:
    page = page_of(Report.of([MAIN], [finished("main", spread(190))], hardware=HARDWARE), tmp_path)
    assert "speedup not measured" in page
    assert "as fast as" not in page
    assert "There is no baseline measurement" in page


def test_the_page_of_a_comparison_has_all_cells_the_paces_of_ranks_and_how_repeats_were_taken(tmp_path: Path) -> None:
    page = page_of(comparison(), tmp_path)
    for text in figures_of(comparison()):
        assert html.escape(text, quote=False) in page
    assert "<td>2 workers (ddp)</td><td>0</td><td>node-1</td><td>336.84</td>" in page
    assert "In each round, all configurations are measured once." in page
    assert "Student's t interval" in html.unescape(page)
    assert "1.90x as fast as 1 worker (95% CI 1.79x to 2.02x)" in page


def test_the_page_of_a_run_speaks_of_slots_and_has_their_picture(tmp_path: Path) -> None:
    page = page_of(report(), tmp_path)
    assert "timed alternately in short intervals" in page
    assert "In each round" not in page
    assert "slowest window" not in page
    assert "<span>2 workers (ddp): 1.90x as fast as 1 worker (95% CI 1.86x to 1.94x)</span>" in page


def test_the_page_of_a_run_of_before_speaks_of_windows(tmp_path: Path) -> None:
    page = page_of(report(has_pairs=False), tmp_path)
    assert "slowest window" in page
    assert "Student" not in page
    assert "2 workers (ddp): inconclusive, 1.90x measured without a confidence interval</span>" in page


ABOUT = About(
    run="20261123-012206-tiny-5449",
    began=datetime(2026, 11, 3, 1, 22),
    command="pipeline run tiny.yaml train.epochs=2",
    link="http://127.0.0.1:5000/#/experiments/1/runs/5bf9",
    needs_ui=True,
    store="experiment tiny in sqlite:///mlflow.db",
    versions=("torch 2.13.0", "ray 2.60.0"),
    experiment="name: <tiny>\n",
)


def test_the_page_knows_its_run(tmp_path: Path) -> None:
    page = page_of(report(), tmp_path, about=ABOUT)
    assert "3 November 2026, 01:22" in page
    assert "<code>pipeline run tiny.yaml train.epochs=2</code>" in page
    assert f'<a href="{ABOUT.link}">{ABOUT.link}</a>, served by <code>pipeline ui</code>' in page
    assert "torch 2.13.0, ray 2.60.0" in page
    assert "<pre>name: &lt;tiny&gt;" in page
    unsent = page_of(report(), tmp_path, about=ABOUT.model_copy(update={"link": "", "command": ""}))
    assert "<dd>experiment tiny in sqlite:///mlflow.db</dd>" in unsent
    assert "Command" not in unsent


def test_the_page_answers_in_the_order_of_the_questions(tmp_path: Path) -> None:
    page = page_of(report().model_copy(update={"advice": (HOSTILE,)}), tmp_path, about=ABOUT, has_pictures=True)
    order = [
        "<h1>", "Started", "Versions and experiment", "as fast as", "validation/accuracy at the end", "samples/s on",
        "startup", 'class="verdict"', "Learning curves", "id='curves'", "smoothed", "id='chart'", "<table",
        "<h2>Recommendations", "<h2>Notes", "Step-time breakdown", "How it was measured", "id='pairs'",
    ]  # fmt: skip
    places = [page.index(each, page.index("<body>")) for each in order]
    assert places == sorted(places)


def test_an_inconclusive_speedup_has_no_accent(tmp_path: Path) -> None:
    ends = [
        finished("main", spread(103), slots=in_turn(103, noise=0.1)),
        finished("baseline", spread(100), slots=in_turn(100)),
    ]
    doubtful = page_of(Report.of([MAIN, BASELINE], ends, hardware=HARDWARE), tmp_path)
    assert "2 workers (ddp): inconclusive, " in doubtful
    assert '<div class="first">' not in doubtful
    assert "tr.main td:first-child { color: var(--accent); }" not in doubtful
    clear = page_of(report(), tmp_path)
    assert '<div class="first"><b>1.90x</b>' in clear
    assert "tr.main td:first-child { color: var(--accent); }" in clear
    assert "inconclusive" not in clear


def test_the_quality_of_the_model_is_among_the_key_figures(tmp_path: Path) -> None:
    assert "<b>0.9735</b><span>validation/accuracy at the end</span>" in page_of(report(), tmp_path)
    assert "<span>scaling efficiency</span>" in page_of(comparison(), tmp_path)


def test_the_key_figure_and_the_verdict_are_of_the_step_that_checkpoint_best_chose(tmp_path: Path) -> None:
    metrics = {"validation/accuracy": 0.97, "validation/f1": 0.9123}
    best = Best(metric="validation/f1", value=0.9123, step=40, epoch=2, metrics=metrics)
    chosen = Report.of([MAIN], [finished("main", spread(190), metrics=metrics, best=best)], hardware=HARDWARE)
    assert "validation/f1 0.9123" in chosen.verdict
    shown = "<b>0.9123</b><span>validation/f1 with the weights of step 40 (epoch 2), the best validation/f1</span>"
    assert shown in page_of(chosen, tmp_path)


def test_the_page_shows_all_that_the_terminal_says(tmp_path: Path) -> None:
    spent = Goodput(seconds={"steps": 60.0, "start": 39.9, "input": 0.1})
    page = page_of(report().model_copy(update={"goodput": spent, "advice": (HOSTILE,)}), tmp_path)
    assert "Goodput 60%: 1 min 0 s of 1 min 40 s were spent in training steps (startup 40%)." in page
    bars = re.findall(r'<td>([^<]+)</td><td class="bar"><i style="width: (\d+)%"></i></td><td>([^<]+)</td>', page)
    assert bars == [("training steps", "60", "1 min 0 s"), ("startup", "40", "40 s")]
    assert f"<p>{report().outcome}.</p>" in page
    assert "Goodput" not in page_of(comparison(), tmp_path)


def test_the_validation_comes_first_among_the_metrics(tmp_path: Path) -> None:
    metrics = {"train/loss": 0.04, "time/step_ms": 5.77, "validation/accuracy": 0.9694}
    ends = [finished("main", spread(190), metrics=metrics)]
    page = page_of(Report.of([MAIN], ends, hardware=HARDWARE), tmp_path)
    places = [page.index(f"<td>{name}</td>") for name in ("validation/accuracy", "train/loss", "time/step_ms")]
    assert places == sorted(places)


def test_a_single_row_without_parts_has_no_chart(tmp_path: Path) -> None:
    end = finished("main", spread(190))
    unmeasured = StepParts(data_wait_ms=1.0, nodes=("node-1",))
    alone = end.model_copy(update={"result": end.result.model_copy(update={"parts": unmeasured})})
    names = publish.save(Report.of([MAIN], [alone], hardware=HARDWARE), tmp_path, warn=pytest.fail)
    assert "report.html" in names
    assert "speedup.png" not in names
    assert "speedup.png" in publish.save(Report.of([MAIN], [end], hardware=HARDWARE), tmp_path, warn=pytest.fail)


def test_the_fragment_of_a_notebook_shows_the_verdict_the_chart_and_what_to_know(tmp_path: Path) -> None:
    (tmp_path / "chart.png").write_bytes(b"PNG")

    shown = fragment(report(), tmp_path / "chart.png", places="run runs/one")

    for text in (report().verdict, f"data:image/png;base64,{b64encode(b'PNG').decode()}", "Notes", "run runs/one"):
        assert html.escape(text, quote=False) in shown


def test_the_advice_on_the_page_ends_in_code_to_paste(tmp_path: Path) -> None:
    advice = Advice(
        reason="Waits 14 ms.",
        change="try loader.num_workers=2",
        key="loader.num_workers",
        overrides="loader.num_workers=2",
        measured=False,
    )
    page = page_of(report().model_copy(update={"advice": (advice,)}), tmp_path)
    assert "Waits 14 ms: try <code>loader.num_workers=2</code> (not measured)</li>" in page
    earlier = advice.model_copy(update={"overrides": "", "change": "write loader.num_workers: 2"})
    assert "write loader.num_workers: 2</li>" in page_of(report().model_copy(update={"advice": (earlier,)}), tmp_path)
