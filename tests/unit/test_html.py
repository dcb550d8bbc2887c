"""The chart and the page as files: pictures have a size, the page needs nothing from outside and leaves nothing out."""

import html
import struct
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from samples import HARDWARE, MAIN, comparison, finished, report, spread, trial

from pipeline.protocol.events import Finished
from pipeline.report import Advice
from pipeline.report.chart import save_chart
from pipeline.report.html import fragment, save_page
from pipeline.report.pairs import save_picture
from pipeline.report.report import Report


@pytest.mark.parametrize("count", [1, 6])
def test_the_chart_is_a_png_as_high_as_its_rows_need(tmp_path: Path, count: int) -> None:
    more = [trial(f"ddp-{n}", "reference", strategy="ddp", workers=n) for n in range(2, count + 1)]
    ends: list[Finished] = [finished(t.name, spread(100 + t.workers, noise=3)) for t in (MAIN, *more)]
    save_chart(Report.of([MAIN, *more], ends, hardware=HARDWARE), tmp_path / "chart.png")

    data = (tmp_path / "chart.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert width == 1600
    assert height == pytest.approx(160 * (1.9 + 0.62 * count), abs=1)
    assert len(data) > 20_000  # an empty canvas of this size compresses to far less


def test_the_chart_takes_names_that_look_like_formulas(tmp_path: Path) -> None:
    ends = [finished("main", spread(190))]
    save_chart(Report.of([MAIN], ends, hardware=r"$\frac{1}$ cores"), tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 20_000


def test_the_chart_of_a_comparison_has_room_for_all_cells_and_for_the_heading_of_weak_scaling(tmp_path: Path) -> None:
    save_chart(comparison(), tmp_path / "chart.png")
    height = struct.unpack(">I", (tmp_path / "chart.png").read_bytes()[20:24])[0]
    assert height == pytest.approx(160 * (1.9 + 0.62 * 5.5), abs=1)


class References(HTMLParser):
    """Collects everything a browser would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]


def page_of(result: Report, folder: Path) -> str:
    save_chart(result, folder / "chart.png")
    if result.main.speedup_pairs:
        save_picture(result, folder / "pairs.png")
    save_page(result, folder / "chart.png", folder / "report.html", pairs=folder / "pairs.png")
    return (folder / "report.html").read_text(encoding="utf-8")


def test_the_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    page = page_of(report(), tmp_path)
    found = References()
    found.feed(page)
    assert [address.split(",")[0] for address in found.addresses] == ["data:image/png;base64"] * 2
    assert not found.tags & {"script", "link", "iframe", "object"}
    assert "http" not in page
    assert "url(" not in page
    assert "@import" not in page


def figures_of(result: Report) -> Iterator[str]:
    for table in (result.results, result.step_parts, result.resources):
        yield from (cell for row in table.rows for cell in row)
        yield from table.notes


def test_the_page_shows_every_figure_and_remark(tmp_path: Path) -> None:
    page = page_of(report(), tmp_path)
    for text in (*figures_of(report()), *report().remarks, HARDWARE, "0.9735"):
        assert text in page


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


def test_the_page_of_a_bare_run_says_that_no_speedup_is_claimed(tmp_path: Path) -> None:
    page = page_of(Report.of([MAIN], [finished("main", spread(190))], hardware=HARDWARE), tmp_path)
    assert "not claimed" in page
    assert "There is no baseline measurement" in page


def test_the_page_of_a_comparison_has_all_cells_the_paces_of_ranks_and_how_repeats_were_taken(tmp_path: Path) -> None:
    page = page_of(comparison(), tmp_path)
    for text in figures_of(comparison()):
        assert html.escape(text, quote=False) in page
    assert "<td>ddp x 2</td><td>0</td><td>node-1</td><td>336.84</td>" in page
    assert "all of them once, then all of them again" in page
    assert "Student's t interval" in html.unescape(page)
    assert "1.90x (95%: 1.79x to 2.02x)" in page
    assert "Weak scaling: every replica" in page


def test_the_page_of_a_run_speaks_of_slots_and_has_their_picture(tmp_path: Path) -> None:
    page = page_of(report(), tmp_path)
    assert "short slots of steps, alternately" in page
    assert "all of them once" not in page
    assert "Weak scaling" not in page
    assert "slowest window" not in page
    assert '<img alt="Speedup in each round, 95%: 1.86x to 1.94x"' in page
    assert "speedup of ddp x 2 (95%: 1.86x to 1.94x)</span>" in page


def test_the_page_of_a_run_of_before_speaks_of_windows(tmp_path: Path) -> None:
    page = page_of(report(has_pairs=False), tmp_path)
    assert "slowest window" in page
    assert "Student" not in page
    assert "Speedup in each round" not in page
    assert "speedup of ddp x 2 (windows from 1.79x to 2.02x)</span>" in page


def test_the_fragment_of_a_notebook_shows_the_verdict_the_chart_and_what_to_know(tmp_path: Path) -> None:
    save_chart(report(), tmp_path / "chart.png")

    shown = fragment(report(), tmp_path / "chart.png", places="run runs/one")

    for text in (report().verdict, "data:image/png;base64,", "Caveats", "run runs/one"):
        assert html.escape(text, quote=False) in shown


def test_the_advice_on_the_page_ends_in_code_to_paste(tmp_path: Path) -> None:
    advice = Advice(
        reason="Waits 14 ms.",
        change="not measured yet, try loader.num_workers=2",
        key="loader.num_workers",
        overrides="loader.num_workers=2",
    )
    page = page_of(report().model_copy(update={"advice": (advice,)}), tmp_path)
    assert "Waits 14 ms: not measured yet, try <code>loader.num_workers=2</code></li>" in page
    earlier = advice.model_copy(update={"overrides": "", "change": "write loader.num_workers: 2"})
    assert "write loader.num_workers: 2</li>" in page_of(report().model_copy(update={"advice": (earlier,)}), tmp_path)
