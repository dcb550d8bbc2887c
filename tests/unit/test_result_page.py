"""The page of a result: it needs nothing from outside, shows all that was measured, and escapes what it is given."""

# promise: a speedup that could be noise says what would resolve it, and has no color
# promise: the report's page: each run gets it, curves, no overlap, contrast, colors for color-blind readers

import html
import math
import re
from html.parser import HTMLParser

from samples import ALL_CORES, BASELINE, HARDWARE, MAIN, finished, in_turn, spread

from pipeline.protocol.events import Metrics, Point
from pipeline.protocol.trial_result import Best, Communication
from pipeline.results.charts import Course, draw_courses, draw_throughput, iter_figures, read_course
from pipeline.results.goodput import Goodput
from pipeline.results.measured import result_of_run
from pipeline.results.page import render
from pipeline.results.record import Advice, Result, Table, format_fact
from pipeline.results.speedup import measure_rows


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


def result(rate: float = 190, *, noise: float = 0.02, **more: object) -> Result:
    """ddp with two workers next to one worker at 100 samples/s and one process with both cores at 180."""
    ends = [
        finished("main", spread(rate), slots=in_turn(rate, noise=noise), communication=21.5, slots_s=30.0, **more),
        finished("reference", spread(180), slots=in_turn(180, noise=-0.06)),
        finished("baseline", spread(100), slots=in_turn(100)),
    ]
    goodput = Goodput(seconds={"steps": 60.0, "start": 39.9, "input": 0.1})
    rows = measure_rows([MAIN, BASELINE, ALL_CORES], ends)
    return result_of_run(rows, hardware=HARDWARE, command="pipeline run a.yaml", goodput=goodput, cores=2)


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


def test_figures_refer_to_nothing_but_themselves_and_no_id_is_there_twice() -> None:
    page = page_of(result(), training())
    used = set(re.findall(r"(?:url\(|href=\")#([^\")]*)", page))
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert used <= set(ids)
    assert len(ids) == len(set(ids))


def test_the_page_shows_every_number_and_note_and_all_that_a_terminal_shows() -> None:
    made = result(metrics={"validation/accuracy": 0.97345})
    page = html.unescape(page_of(made, training()))
    for fact in made.all_facts:
        assert fact.value is None or f">{format_fact(fact)}<" in page
    for text in (*made.headline, *made.notes, made.title, HARDWARE, *(one.reason for one in made.advice)):
        assert text in page
    for table in made.tables:
        for text in (table.title, *table.header, *table.notes, *(row[0] for row in table.rows)):
            assert str(text) in page
    assert "Goodput 60%: 1 min 0 s of 1 min 40 s were spent in training steps (startup 40%)." in page


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


def test_the_page_answers_in_the_order_of_the_questions() -> None:
    page = page_of(result(metrics={"validation/accuracy": 0.97345}), training(), Command="pipeline run a.yaml")
    order = [
        "<h1>", "as fast as 1 worker", "<b>1.90x (1.86 to 1.94)</b>", "<b>0.9735</b>", "<table", "Learning curves",
        "Throughput", "Parts of a step</h2>", "<h2>Notes", "Where the time went", "All numbers", "The run",
    ]  # fmt: skip
    places = [page.index(each, page.index("<body>")) for each in order]
    assert places == sorted(places)


def test_what_is_asked_last_is_folded() -> None:
    page = page_of(result(), training(), Command="pipeline run a.yaml")
    folded = "".join(re.findall(r"<details>.*?</details>", page, re.DOTALL))
    assert all(title in folded for title in ("Memory and startup", "Where the time went", "All numbers", "The run"))
    assert "<details open" not in page
    assert "as fast as" not in folded


def test_the_answer_is_of_the_step_that_checkpoint_best_chose() -> None:
    metrics = {"validation/accuracy": 0.97, "validation/f1": 0.9123}
    best = Best(metric="validation/f1", value=0.9123, step=40, epoch=2, metrics=metrics)
    made = result(metrics=metrics, best=best)
    assert (
        "validation/f1 0.9123, validation/accuracy 0.97 (weights of step 40, the best validation/f1)" in made.headline
    )
    assert "<b>0.9123</b><span>validation/f1</span>" in page_of(made)


def test_the_page_of_a_bare_run_says_that_no_speedup_was_measured() -> None:
    made = result_of_run(measure_rows([MAIN], [finished("main", spread(190))]), hardware=HARDWARE, missing="failed")
    page = page_of(made)
    assert "Speedup not measured" in page
    assert "as fast as" not in page
    assert "Throughput</h2>" not in page


def test_communication_is_told_once_with_what_it_is() -> None:
    page = page_of(synchronized())
    said = (
        "Gradient synchronization took 12.0 ms of each step, from the first bucket sent to the last received, 21.5 ms "
        "of it while nothing else was computed (exposed communication)."
    )
    assert page.count(said) == 1


def synchronized() -> Result:
    end = finished("main", spread(190), slots=in_turn(190), communication=21.5)
    own = end.result.model_copy(update={"communication": Communication(ms=12.0, share=0.25)})
    ends = [end.model_copy(update={"result": own}), finished("baseline", spread(100), slots=in_turn(100))]
    return result_of_run(measure_rows([MAIN, BASELINE], ends), hardware=HARDWARE)


# The speedup


def test_a_speedup_that_could_be_noise_has_no_color_and_says_what_would_resolve_it() -> None:
    clear, doubtful = result(), result(103, noise=0.05)
    accent, grey = ("#0072b2", "#c3cad1")
    assert [bar_color(one) for one in (clear, doubtful)] == [accent, grey]
    page = page_of(doubtful)
    assert "Inconclusive: can&#39;t tell whether 2 workers are faster than 1 worker" in page
    assert "which includes 1.00x" in page
    assert "8 rounds are too few for a speedup this close to 1x" in page
    assert "<code>pipeline run a.yaml benchmark.rounds=21 benchmark.time_budget_s=80</code>" in page
    assert "nconclusive" not in page_of(clear)


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


def test_the_curves_are_of_each_step_and_of_the_validation_set() -> None:
    events = [
        Metrics(step=step, epoch=1, points=(Point("validation/accuracy", step, value), Point("train/loss", step, 1.0)))
        for step, value in ((50, 0.5), (100, 0.9), (100, 0.8))  # which was evaluated again
    ]
    course = read_course("training", training().losses, events)
    assert course.validation == {"validation/accuracy": ([50, 100], [0.5, 0.9])}
    drawn = draw_courses([training()])
    assert {"Loss", "training", "training, smoothed", "validation", "validation/accuracy"} <= set(texts(drawn))
    (title, svg, caption), *_ = iter_figures(result(), [training()])
    assert (title, svg) == ("Learning curves", drawn)
    assert caption.startswith("Training loss: the loss of each step (thin)")


def test_a_training_without_losses_has_no_empty_axes() -> None:
    titles = [[title for title, *_ in iter_figures(result(), courses)] for courses in ([], [Course("training", ())])]
    assert titles == [["Throughput", "Parts of a step"]] * 2
    assert "validation/accuracy" not in texts(draw_courses([Course("training", training().losses)]))


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


def test_trainings_are_compared_by_name() -> None:
    names = [f"trial {number}: optimizer.lr=0.00{number}" for number in range(1, 4)]
    drawn = texts(draw_courses([training(90 + number, name=name) for number, name in enumerate(names)]))
    assert set(names) <= set(drawn)
    assert "training" not in drawn


def test_a_long_training_is_small() -> None:
    assert len(draw_courses([training(100_000, gap=77)])) < 400_000


def test_a_name_is_no_formula_and_no_markup() -> None:
    drawn = draw_courses([training(name=r"$\frac{1}$"), training(name="<b>&")])
    assert {r"$\frac{1}$", "<b>&"} <= set(texts(drawn))
    assert "<b>" not in drawn
