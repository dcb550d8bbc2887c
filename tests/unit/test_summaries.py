"""The pictures and the page of a sweep: what they show, and what they leave out."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from samples import swept

from pipeline.report.page import publish
from pipeline.report.pictures import sweep_chart
from pipeline.report.pictures.palette import LIGHT


def dots(axes: Axes) -> list[str]:
    return [str(line.get_markerfacecolor()) for line in axes.lines for _ in np.atleast_1d(line.get_xdata())]


def test_each_parameter_has_a_panel_with_a_dot_for_each_trial_that_has_a_value() -> None:
    optimizer, rate, hidden = sweep_chart.draw(swept(9).swept).axes
    for axes in (optimizer, rate, hidden):
        assert sorted(dots(axes)) == sorted([LIGHT["grey"]] * 2 + [LIGHT["accent"]] * 6 + ["none"])
    assert [axes.get_xscale() for axes in (optimizer, rate, hidden)] == ["linear", "log", "linear"]
    assert [label.get_text() for label in optimizer.get_xticklabels()] == ["SGD", "Adam2", "Adam4", "Adam6", "Adam8"]


def test_the_caption_says_what_the_dots_leave_out() -> None:
    said = sweep_chart.caption(swept(9).swept)
    assert said == (
        "Each dot is a trial with its last validation/loss; lower is better. A ring marks trial 4, the best. Trials "
        "that didn't finish have the value that they had reached. 1 of 9 trials has no value."
    )


def test_a_sweep_with_one_value_has_no_picture_of_its_parameters(tmp_path: Path) -> None:
    assert "sweep.png" not in publish.save(swept(2), tmp_path, warn=pytest.fail)
    assert "sweep.png" in publish.save(swept(3), tmp_path, warn=pytest.fail)


def test_the_page_of_a_sweep_leads_to_its_best_trial(tmp_path: Path) -> None:
    publish.save(swept(9), tmp_path, warn=pytest.fail)
    page = (tmp_path / "report.html").read_text()
    order = [
        "<title>lab: sweep", "<b>0.2</b>", "trial 4, the best", "6 finished, 3 stopped early",
        "Best: trial 4 of 9", "by each parameter", "<svg", "A ring marks", ">Trials<", 'class="main"',
        "To train trial 4 again", "pipeline run",
    ]  # fmt: skip
    places = [page.index(part) for part in order]
    assert places == sorted(places), order
