"""Speedup, efficiency and remarks against figures worked out by hand; the chart and the page as files."""

import json
import struct
from html.parser import HTMLParser
from pathlib import Path

import pytest
from samples import ALL_CORES, BASELINE, HARDWARE, MAIN, finished, report, spread, trial

from pipeline.contract import Spread, Trial
from pipeline.events import Finished
from pipeline.speedup.chart import save_chart
from pipeline.speedup.page import save_page
from pipeline.speedup.report import Report


def compare(main: Trial, *, main_at: Spread, baseline_at: Spread) -> Report:
    ends = [finished(main.name, main_at), finished("baseline", baseline_at)]
    return Report.of([main, BASELINE], ends, hardware=HARDWARE)


def test_speedup_is_the_ratio_of_medians_and_efficiency_divides_it_by_the_replicas() -> None:
    main = trial("main", "main", strategy="ddp", workers=4)
    result = compare(main, main_at=spread(300, noise=30), baseline_at=spread(100, noise=10))

    assert result.speedup == pytest.approx(3.0)
    assert result.efficiency == pytest.approx(0.75)
    assert result.main.speedup_low == pytest.approx(270 / 110)
    assert result.main.speedup_high == pytest.approx(330 / 90)
    assert result.main.cpus == 4


def test_replicas_of_dp_are_its_gpus() -> None:
    baseline = trial("baseline", "baseline", gpus=1)
    main = trial("main", "main", strategy="dp", gpus=4)
    ends = [finished("main", spread(200)), finished("baseline", spread(100))]
    result = Report.of([main, baseline], ends, hardware="4 x NVIDIA H200")

    assert (result.speedup, result.efficiency) == (2.0, 0.5)
    assert (result.main.title, result.main.devices) == ("dp x 4", "4 GPUs")
    assert result.remarks == ()


def test_rows_are_baseline_then_references_by_size_then_main() -> None:
    more = [trial(f"ddp-{n}", "reference", strategy="ddp", workers=n) for n in (8, 4)]
    ends = [finished(t.name, spread(100)) for t in (MAIN, *more, BASELINE)]
    result = Report.of([MAIN, *more, BASELINE], ends, hardware=HARDWARE)
    assert [row.trial for row in result.rows] == ["baseline", "ddp-4", "ddp-8", "main"]
    assert result.main.trial == "main"


def test_more_cores_for_one_replica_have_a_speedup_but_no_efficiency() -> None:
    reference = report().rows[1]
    assert reference.speedup == pytest.approx(1.8)
    assert reference.efficiency is None


def test_dp_with_one_replica_claims_nothing_however_fast_it_was() -> None:
    result = compare(trial("main", "main", strategy="dp"), main_at=spread(190), baseline_at=spread(100))
    assert result.speedup is None
    assert result.efficiency is None
    assert result.remarks == (
        "dp with fewer than two GPUs is one replica; nothing runs in parallel, so no speedup is claimed for it.",
    )
    assert "no speedup is claimed" in result.headline


def test_a_main_trial_that_repeats_the_baseline_claims_nothing() -> None:
    result = compare(trial("main", "main"), main_at=spread(120), baseline_at=spread(100))
    assert result.speedup is None
    assert result.remarks == ("The main trial and its baseline are both single, so no speedup is claimed.",)


def test_one_process_with_all_the_cores_is_named() -> None:
    assert report().remarks == (
        "One process with all 2 cores does 180 samples/s: on this machine ddp x 2 is 1.06x that. "
        "Data parallelism pays when devices are separate.",
    )


def test_one_process_with_all_the_cores_that_is_clearly_slower_gets_no_comment() -> None:
    speeds = {"main": spread(190, noise=2), "reference": spread(120, noise=2), "baseline": spread(100)}
    ends = [finished(name, speed) for name, speed in speeds.items()]
    (remark,) = Report.of([MAIN, BASELINE, ALL_CORES], ends, hardware=HARDWARE).remarks
    assert remark.endswith("on this machine ddp x 2 is 1.58x that.")


@pytest.mark.parametrize(
    ("main_at", "resolved"),
    [
        (spread(103, noise=5), False),  # 98/102 to 108/98: on both sides of 1
        (spread(110, noise=5), True),  # 105/102: all windows faster
        (spread(90, noise=5), True),  # 95/98: all windows slower, and that is a result too
    ],
)
def test_a_speedup_within_the_noise_is_called_unresolved(main_at: Spread, resolved: bool) -> None:
    remarks = compare(MAIN, main_at=main_at, baseline_at=spread(100, noise=2)).remarks
    expected = ("The speedup of ddp x 2, 1.03x (0.96x to 1.10x), is not resolved: within the noise of these windows.",)
    assert remarks == (() if resolved else expected)


def test_a_single_window_has_no_spread_to_show() -> None:
    result = compare(MAIN, main_at=spread(190, windows=1), baseline_at=spread(100))
    assert result.cells[-1][2] == "190"
    assert result.remarks == ("Some throughput was measured in a single window, so its noise is unknown.",)


def test_a_trial_that_did_not_finish_is_left_out_and_named() -> None:
    ends = [finished("main", spread(190)), finished("baseline", spread(100))]
    result = Report.of([MAIN, BASELINE, ALL_CORES], ends, hardware=HARDWARE)
    assert [row.trial for row in result.rows] == ["baseline", "main"]
    assert result.remarks == ("reference (single, 2 cores) did not finish; it is left out.",)


def test_without_a_baseline_there_is_no_speedup() -> None:
    result = Report.of([MAIN, BASELINE], [finished("main", spread(190))], hardware=HARDWARE)
    assert result.speedup is None
    assert result.remarks == (
        "baseline (single) did not finish; it is left out.",
        "There is no baseline measurement, so no speedup is claimed.",
    )


def test_without_the_main_trial_there_is_nothing_to_report() -> None:
    with pytest.raises(ValueError, match=r"nothing to report: only baseline finished"):
        Report.of([MAIN, BASELINE], [finished("baseline", spread(100))], hardware=HARDWARE)


def test_the_report_survives_json() -> None:
    assert Report.model_validate_json(report().to_json()) == report()
    assert json.loads(report().to_json())["rows"][2]["speedup"] == pytest.approx(1.9)


def test_the_table_for_mlflow_has_one_entry_per_row_in_every_column() -> None:
    table = report().table()
    assert {len(column) for column in table.values()} == {3}
    assert table["samples_per_second_low"] == [95.0, 171.0, 188.0]
    assert table["efficiency"] == [None, None, pytest.approx(0.95)]
    assert table["validation/accuracy"] == [None, None, 0.97345]
    assert table["peak_memory_mb"] == [410.0] * 3


def test_markdown_holds_the_result_the_table_and_the_remarks() -> None:
    text = report().markdown()
    assert text.startswith("**ddp x 2 does 190 samples/s: 1.90x the throughput of single (1.79x to 2.02x)")
    assert "| ddp x 2 | 2 cores | 190 ± 2 | 1.90x | 95% | 21.5 | 0.2 |\n" in text
    assert "- One process with all 2 cores" in text
    assert "Strong scaling" in text


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


def test_the_chart_takes_names_that_look_like_formulas_and_noise_below_zero(tmp_path: Path) -> None:
    ends = [finished("main", spread(190), communication=-0.4, data_wait=-0.2)]
    save_chart(Report.of([MAIN], ends, hardware=r"$\frac{1}$ cores"), tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 20_000


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
    save_page(result, folder / "chart.png", folder / "report.html")
    return (folder / "report.html").read_text(encoding="utf-8")


def test_the_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    page = page_of(report(), tmp_path)
    found = References()
    found.feed(page)
    assert [address.split(",")[0] for address in found.addresses] == ["data:image/png;base64"]
    assert not found.tags & {"script", "link", "iframe", "object"}
    assert "http" not in page
    assert "url(" not in page
    assert "@import" not in page


def test_the_page_shows_every_figure_and_remark(tmp_path: Path) -> None:
    page = page_of(report(), tmp_path)
    for text in (*(cell for row in report().cells for cell in row), *report().remarks, HARDWARE, "0.9735"):
        assert text in page


def test_the_page_escapes_what_it_is_given(tmp_path: Path) -> None:
    hostile = report().model_copy(update={"name": "<script>alert(1)</script>", "remarks": ("<img src=x>",)})
    found = References()
    page = page_of(hostile, tmp_path)
    found.feed(page)
    assert "script" not in found.tags
    assert "x" not in found.addresses
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_the_page_of_a_bare_run_says_that_no_speedup_is_claimed(tmp_path: Path) -> None:
    page = page_of(Report.of([MAIN], [finished("main", spread(190))], hardware=HARDWARE), tmp_path)
    assert "not claimed" in page
    assert "There is no baseline measurement" in page
