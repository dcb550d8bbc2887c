"""The page of a result: it needs nothing from outside, shows all that was measured, and escapes what it is given."""

# promise: a speedup that could be noise says what would resolve it, and has no color
# promise: the report's page: each run gets it, curves, no overlap, contrast, colors for color-blind readers

import html
import math
import re
from html.parser import HTMLParser
from itertools import combinations
from math import dist

import pytest
from samples import ALL_CORES, BASELINE, HARDWARE, MAIN, finished, in_turn, spread

from pipeline.protocol.events import AnyEvent, Metrics, Point
from pipeline.protocol.trial_result import Best, Communication
from pipeline.results.breakdown import PARTS, parts_table
from pipeline.results.goodput import Goodput
from pipeline.results.measured import result_of_run
from pipeline.results.page import (
    Course,
    _smooth,
    _thin,
    draw_courses,
    draw_parts,
    draw_throughput,
    iter_figures,
    read_course,
    render,
)
from pipeline.results.record import Advice, Result, Table, format_fact
from pipeline.results.speedup import measure_rows

BARE = Result(kind="run", name="lab", title="", headline=(), verdict="")
COMMUNICATION = (
    "Gradient synchronization took 12.0 ms of each step, from the first bucket sent to the last received, 21.5 ms "
    "of it while nothing else was computed (exposed communication)."
)


class References(HTMLParser):
    """Collects everything that a browser would fetch or run."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [
            value or ""
            for name, value in attrs
            if name in ("src", "href", "xlink:href", "srcset", "action", "data") and not (value or "").startswith("#")
        ]


COMMAND = "pipeline run a.yaml"


def result(
    rate: float = 190, *, noise: float = 0.02, exchange: Communication | None = None, command: str = COMMAND,
    **more: object,
) -> Result:  # fmt: skip
    """ddp with two workers next to one worker at 100 samples/s and one process with both cores at 180."""
    main = finished("main", spread(rate), slots=in_turn(rate, noise=noise), communication=21.5, slots_s=30.0, **more)
    ends = [
        main.model_copy(update={"result": main.result.model_copy(update={"communication": exchange})}),
        finished("reference", spread(180), slots=in_turn(180, noise=-0.06)),
        finished("baseline", spread(100), slots=in_turn(100)),
    ]
    goodput = Goodput(seconds={"steps": 60.0, "start": 39.9, "input": 0.1})
    rows = measure_rows([MAIN, BASELINE, ALL_CORES], ends)
    return result_of_run(rows, hardware=HARDWARE, command=command, goodput=goodput, cores=2)


def training(steps: int = 100, *, gap: int | None = None, name: str = "training") -> Course:
    """A training that learns, with an evaluation in the middle and one at the end."""
    losses = [2.0 * math.exp(-3 * step / steps) + 0.1 * math.sin(step) + 0.2 for step in range(1, steps + 1)]
    if gap is not None:
        losses[gap] = math.nan
    at = [steps // 2, steps]
    return Course(name, losses, {"validation/accuracy": (at, [0.5, 0.9]), "validation/loss": (at, [1.0, 0.6])})


def page_of(made: Result, *courses: Course, **about: str) -> str:
    return render(made, about=about, figures=list(iter_figures(made, courses)))


def texts(drawn: str) -> list[str]:
    return [html.unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)<", drawn)]


# The page


def test_the_page_needs_nothing_from_outside() -> None:
    page = page_of(result(), training(), Command="pipeline run a.yaml")
    found = References(page)
    assert found.addresses == []
    assert page.count("<svg ") == 3
    assert not found.tags & {"script", "link", "iframe", "object", "img"}
    assert page.count("url(") == page.count("url(#")
    assert "@import" not in page
    used = set(re.findall(r"(?:url\(|href=\")#([^\")]*)", page))
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert set() < used <= set(ids)
    assert len(ids) == len(set(ids))


def test_the_page_shows_every_number_and_note_and_all_that_a_terminal_shows() -> None:
    made = result(metrics={"validation/accuracy": 0.97345}, exchange=Communication(ms=12.0, share=0.25))
    page = html.unescape(page_of(made, training()))
    for fact in made.all_facts:
        assert fact.value is None or f">{format_fact(fact)}<" in page
    for text in (*made.headline, *made.notes, made.title, HARDWARE, *(one.reason for one in made.advice)):
        assert text in page
    for table in made.tables:
        for text in (table.title, *table.header, *table.notes, *(row[0] for row in table.rows)):
            assert str(text) in page
    assert "Goodput 60%: 1 min 0 s of 1 min 40 s were spent in training steps (startup 40%)." in page
    assert page.count(COMMUNICATION) == 1


def test_the_page_escapes_what_it_is_given() -> None:
    advice = Advice(reason="<iframe>", change="<object>", overrides=("<form action=x>",))
    table = Table(title="<embed>", header=("<b>",), rows=(("<img src=x>",),), notes=("<link href=x>",))
    hostile = result().model_copy(
        update={"name": "<script>alert(1)</script>", "advice": (advice,), "tables": (table,), "notes": ("<img src=x>",)}
    )
    page = page_of(hostile, training(), Experiment="name: <script>\n", Run="<script>")
    found = References(page)
    assert not found.tags & {"script", "iframe", "object", "form", "embed", "img"}
    assert "x" not in found.addresses
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<pre>name: &lt;script&gt;" in page


def test_the_page_answers_in_the_order_of_the_questions_and_folds_what_is_asked_last() -> None:
    page = page_of(result(metrics={"validation/accuracy": 0.97345}), training(), Command="pipeline run a.yaml")
    order = [
        "<h1>", "as fast as 1 worker", "<b>1.90x (1.86 to 1.94)</b>", "<b>0.9735</b>", "<table", "Learning curves",
        "Throughput", "Parts of a step</h2>", "<h2>Notes", "Where the time went", "All numbers", "The run",
    ]  # fmt: skip
    places = [page.index(each, page.index("<body>")) for each in order]
    assert places == sorted(places)
    folded = "".join(re.findall(r"<details>.*?</details>", page, re.DOTALL))
    assert all(title in folded for title in ("Memory and startup", "Where the time went", "All numbers", "The run"))
    assert "<details open" not in page
    assert "as fast as" not in folded


def test_the_answer_is_of_the_step_that_checkpoint_best_chose() -> None:
    metrics = {"validation/accuracy": 0.97, "validation/f1": 0.9123}
    best = Best(metric="validation/f1", value=0.9123, step=40, epoch=2, metrics=metrics)
    made = result(metrics=metrics, best=best)
    said = "validation/f1 0.9123, validation/accuracy 0.97 (weights of step 40, the best validation/f1)"
    assert said in made.headline
    assert "<b>0.9123</b><span>validation/f1</span>" in page_of(made)


def test_the_page_of_a_bare_run_says_that_no_speedup_was_measured() -> None:
    made = result_of_run(measure_rows([MAIN], [finished("main", spread(190))]), hardware=HARDWARE, missing="failed")
    page = page_of(made)
    assert "Speedup not measured" in page
    assert "as fast as" not in page
    assert "Throughput</h2>" not in page


def test_a_speedup_that_could_be_noise_has_no_color_and_says_what_would_resolve_it() -> None:
    clear, doubtful = result(), result(103, noise=0.05)
    assert [bar_color(one) for one in (clear, doubtful, result(noise=1.5))] == ["#0072b2", "#c3cad1", "#c3cad1"]
    page = page_of(doubtful)
    assert "Inconclusive: can&#39;t tell whether 2 workers are faster than 1 worker" in page
    assert "which includes 1.00x" in page
    assert "8 rounds are too few for a speedup this close to 1x" in page
    assert "<code>pipeline run a.yaml benchmark.rounds=21 benchmark.time_budget_s=80</code>" in page
    assert "nconclusive" not in page_of(clear)
    assert result(103, noise=0.05, command="").next[-1] == ("", "benchmark.rounds=21 benchmark.time_budget_s=80")


def bar_color(made: Result) -> str:
    """The color of the bar of the row that the result is about; the others have none."""
    colors = re.findall(r'style="fill: (#[0-9a-f]{6})"', draw_throughput(made.tables[0], made))
    first, second, main = [color for color in colors if color not in ("#ffffff", "#000000")]
    assert {first, second} == {"#c3cad1"}
    return main


def test_the_chart_has_each_row_with_its_throughput_and_its_interval() -> None:
    drawn = texts(draw_throughput((made := result()).tables[0], made))
    assert "2 workers (ddp)" in drawn
    assert "190, 1.90x (1.86 to 1.94)" in drawn
    noisy = result(190, noise=800.0)
    assert "190, too noisy" in texts(draw_throughput(noisy.tables[0], noisy))


# The curves

LOSSES = (4.0, 3.0, 2.0, 1.0, 1.0, math.nan, 1.0, 1.0)


def validated(step: int, *, trial: str = "main", **values: float) -> Metrics:
    points = tuple(Point(f"validation/{name}", step, value) for name, value in values.items())
    return Metrics(trial=trial, step=step, epoch=step // 4, points=points)


EVENTS: list[AnyEvent] = [
    Metrics(step=2, epoch=1, points=(Point("train/loss", 2, 3.0), Point("speedup", 2, 1.7))),
    validated(4, loss=1.5, accuracy=0.7),
    validated(8, loss=1.6, accuracy=0.8),
]


def test_a_course_has_each_loss_and_each_evaluation_of_its_own_trial_once() -> None:
    again = [validated(8, accuracy=0.1), validated(12, accuracy=0.9), validated(16, trial="ddp-2", accuracy=0.2)]
    validation = {"validation/loss": ([4, 8], [1.5, 1.6]), "validation/accuracy": ([4, 8, 12], [0.7, 0.8, 0.9])}
    assert read_course("ddp, 2 workers", LOSSES, [*EVENTS, *again]) == Course("ddp, 2 workers", LOSSES, validation)


@pytest.mark.parametrize("losses", [(), (1.0,), (1.0, math.nan, math.inf)])
def test_a_training_without_two_losses_has_no_curve_and_no_empty_axes(losses: tuple[float, ...]) -> None:
    course = read_course("", losses, EVENTS)
    assert not list(iter_figures(BARE, [course]))
    assert [title for title, *_ in iter_figures(result(), [course])] == ["Throughput", "Parts of a step"]
    ((title, _, caption),) = iter_figures(BARE, [course, Course("", LOSSES)])
    assert title == "Learning curves"
    assert caption.startswith("Training loss: the loss of each step (thin)")


def test_one_training_is_drawn_with_its_validation_and_several_by_their_names() -> None:
    alone = texts(draw_courses([training()]))
    assert {"Loss", "training", "training, smoothed", "validation", "validation/accuracy"} <= set(alone)
    assert "validation/accuracy" not in texts(draw_courses([Course("training", training().losses)]))
    names = ["trial 1: optimizer.lr=0.001", r"$\frac{1}$", "<b>&"]  # no formula and no markup
    several = draw_courses([training(90 + number, name=name) for number, name in enumerate(names)])
    assert set(names) <= set(texts(several))
    assert "training" not in texts(several)
    assert "<b>" not in several


def test_a_loss_that_is_not_finite_leaves_a_gap() -> None:
    whole, gapped = (draw_courses([Course("training", training(gap=gap).losses)]) for gap in (None, 50))
    assert longest_lines(gapped) == [count + 1 for count in longest_lines(whole)]


def longest_lines(drawn: str) -> list[int]:
    """How often the pen is put down for the losses and for their average."""
    paths = [path for path in re.findall(r' d="([^"]*)"', drawn) if path.count("L") > 50]
    return [path.count("M") for path in paths]


def test_losses_over_decades_have_a_logarithmic_axis() -> None:
    course = training()
    assert "1000" not in texts(draw_courses([course]))
    drawn = draw_courses([Course("training", [1e4, *course.losses[1:]])])
    assert {"1", "10", "100", "1000", "10000"} <= set(texts(drawn))


def test_the_average_is_that_of_equal_values_from_the_first_on() -> None:
    assert _smooth([3.0] * 5, span=10) == pytest.approx([3.0] * 5)
    assert _smooth([1.0, 3.0], span=2) == pytest.approx([1.0, (0.25 * 1 + 0.5 * 3) / 0.75])
    values = _smooth([1.0, math.nan, 1.0], span=4)
    assert math.isnan(values[1])
    assert values[2] == 1.0


def test_a_long_training_is_small_and_keeps_extremes_and_gaps() -> None:
    assert len(draw_courses([training(100_000, gap=77)])) < 400_000
    xs = list(range(10_000))
    ys = [math.sin(x / 500) for x in xs]
    ys[1234], ys[4321] = 50.0, -50.0
    few_x, few_y = _thin(xs, ys)
    assert len(few_x) <= 1000
    assert few_x == sorted(few_x)
    assert {50.0, -50.0} <= set(few_y)
    assert _thin(xs[:1000], ys[:1000]) == (xs[:1000], ys[:1000])
    assert any(map(math.isnan, _thin(xs, [1.0] * 5000 + [math.nan] * 100 + [1.0] * 4900)[1]))


# The colors

# Machado, Oliveira and Fernandes 2009, "A Physiologically-based Model for Simulation of Color Vision Deficiency", IEEE
# Transactions on Visualization and Computer Graphics 15(6): the matrices of severity 1.0, for linear RGB.
VISION = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
}
PAPER = "#ffffff"
"""Figures are on white in both themes."""
APART = 20.0  # Distance in CIELAB; about 2 can just be seen in patches side by side


def linear(color: str) -> list[float]:
    """A color of sRGB in linear RGB."""
    shares = (int(color[index : index + 2], 16) / 255 for index in (1, 3, 5))
    return [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]


def seen(color: str, vision: str) -> tuple[float, float, float]:
    """A color as a reader sees it, in CIELAB with the white of D65."""
    red, green, blue = (
        min(1.0, max(0.0, sum(weight * share for weight, share in zip(row, linear(color), strict=True))))
        for row in VISION[vision]
    )
    x = (0.4124564 * red + 0.3575761 * green + 0.1804375 * blue) / 0.95047
    y = 0.2126729 * red + 0.7151522 * green + 0.0721750 * blue
    z = (0.0193339 * red + 0.1191920 * green + 0.9503041 * blue) / 1.08883
    x, y, z = (t ** (1 / 3) if t > 216 / 24389 else (24389 / 27 * t + 16) / 116 for t in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def contrast(color: str, paper: str) -> float:
    """The contrast of WCAG 2.1: 4.5 for text, 3 for what a picture is made of."""

    def luminance(color: str) -> float:
        return sum(weight * share for weight, share in zip((0.2126, 0.7152, 0.0722), linear(color), strict=True))

    low, high = sorted(map(luminance, (color, paper)))
    return (high + 0.05) / (low + 0.05)


def colors_of(drawn: str, count: int) -> list[str]:
    """The colors of a figure, each once, but for those of its paper, its text and its frames."""
    found = dict.fromkeys(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", drawn))
    colors = [color for color in found if color not in (PAPER, "#000000", "#1b1f24")]
    assert len(colors) == count
    return colors


def parts_of_a_step() -> list[str]:
    ends = [finished("main", spread(190), communication=21.5), finished("baseline", spread(100))]
    table = parts_table(measure_rows([MAIN, BASELINE], ends))
    assert table is not None
    return colors_of(draw_parts(table), len(PARTS))


FIGURES = {
    "lines": lambda: colors_of(
        draw_courses([Course(f"trial {number}", (3.0, 2.0, 1.0 + number)) for number in range(5)]), 5
    ),
    "parts of a step": parts_of_a_step,
    "loss and validation": lambda: colors_of(draw_courses([training()]), 2),
}


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("name", FIGURES)
def test_colors_stay_apart_for_color_blind_readers_and_from_the_paper(name: str, vision: str) -> None:
    found = FIGURES[name]()
    near = {pair: dist(*(seen(color, vision) for color in pair)) for pair in combinations(found, 2)}
    assert min(near.values()) > APART, near
    assert min(contrast(color, PAPER) for color in found) >= 3.0


def test_what_it_would_look_like_if_they_did_not() -> None:
    red, green = "#c05020", "#708010"
    assert dist(seen(red, "normal"), seen(green, "normal")) > 40
    assert dist(seen(red, "deuteranopia"), seen(green, "deuteranopia")) < APART


def test_text_can_be_read_on_the_paper_of_both_themes() -> None:
    page = render(BARE, about={})
    light, dark = (dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", rule)) for rule in re.findall(r":root \{(.*)\}", page))
    assert list(light) == list(dark)
    for colors in (light, dark):
        for paper, name in ((paper, name) for paper in ("paper", "tint") for name in ("ink", "muted")):
            assert contrast(colors[name], colors[paper]) >= 4.5, (name, paper)
        assert contrast(colors["accent"], colors["paper"]) >= 3.0
