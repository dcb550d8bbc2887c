"""What a user sees: plain lines in a pipe, a live display on a terminal, and the final table at 80 columns."""

# promise: a terminal shows at once what is waited for, then a bar that moves, and what is done after the last step

import io
import os
import re
from contextlib import redirect_stderr
from types import SimpleNamespace
from typing import Any, cast

import pytest
import rich.console
from samples import BASELINE, DDP_2, HARDWARE, LOSSES, MAIN, finished, in_turn, rows, spread

from pipeline.commands import invocation
from pipeline.commands.invocation import Invocation, invoked
from pipeline.commands.options import show as show_error
from pipeline.errors import ExperimentError, Problem, UsageError
from pipeline.protocol.events import (
    Advanced,
    AnyEvent,
    Failed,
    Finished,
    FirstStep,
    Heartbeat,
    Metrics,
    Phase,
    Point,
    RunOpened,
    Started,
    Trained,
    TrialOpened,
    Warned,
)
from pipeline.protocol.trial import Rank
from pipeline.record.console import Console, stages_on
from pipeline.record.screen import OptionalConsole, Terminal, write
from pipeline.record.trial_progress import facts
from pipeline.results.measured import result_of_run, speedup_table
from pipeline.results.record import Table
from pipeline.results.speedup import find_main, measure_rows
from pipeline.results.terminal import format_table, print_result
from pipeline.system import begin_stage, end_stage

RAY = MAIN.model_copy(update={"launcher": "ray"})


def pipe() -> rich.console.Console:
    return rich.console.Console(file=io.StringIO(), width=80)


def terminal(*, width: int = 80, **more: Any) -> rich.console.Console:
    return rich.console.Console(file=io.StringIO(), width=width, force_terminal=True, force_interactive=True, **more)


def printed(stdout: rich.console.Console) -> str:
    assert isinstance(stdout.file, io.StringIO)
    return stdout.file.getvalue()


def opened() -> TrialOpened:
    return TrialOpened(time=0, trial="main", role="main", title="ddp, 2 workers", tags={}, params={})


def started(*, devices: tuple[str, ...] = ("node-1 cpu x 1 thread",) * 2) -> Started:
    return Started(
        time=1, trial="main", total_steps=40, steps_per_epoch=20, epochs=2, train_samples=1437, epoch_samples=1437,
        validation_samples=360,
        parameters=78186, devices=devices, data_name="digits", data_digest="0",
    )  # fmt: skip


def metrics(step: int, *, time: float, **values: float) -> Metrics:
    points = tuple(Point(name.replace("__", "/"), step, value) for name, value in values.items())
    return Metrics(time=time, trial="main", step=step, epoch=(step - 1) // 20 + 1, points=points)


def end() -> Finished:
    return finished("main", spread(1312), metrics={"validation/accuracy": 0.9731})


def show(*events: AnyEvent, stdout: rich.console.Console) -> str:
    console = Console(Terminal.on(stdout), trials=[BASELINE, RAY])
    for event in events:
        console.receive(event)
    console.close()
    return printed(stdout)


def test_a_pipe_gets_one_whole_plain_line_for_each_thing_that_happens() -> None:
    training = [metrics(step, time=2 + step, train__loss=2 / step, throughput__samples_per_second=1310.4)
                for step in range(1, 11)]  # fmt: skip
    validation = metrics(20, time=13, validation__accuracy=0.91, validation__loss=0.3)
    warning = Warned(time=14, trial="main", message="the [bold]last[/bold] batch is small")

    text = show(opened(), started(), FirstStep(time=2, trial="main"), *training, validation, warning, end(),
                stdout=pipe())  # fmt: skip

    assert text.splitlines() == [
        "ddp, 2 workers: starting 2 workers with ray ...",
        "ddp, 2 workers: 78,186 parameters, 1,437 training and 360 validation samples, 40 steps, "
        "on 2 x (node-1 cpu x 1 thread)",
        "ddp, 2 workers: step 8/40, 0:32 left, epoch 1/2, loss 0.25, 1,310 samples/s",
        "ddp, 2 workers: step 20/40, 0:11 left, validation/accuracy 0.91, validation/loss 0.3, epoch 1/2, loss 0.2",
        "ddp, 2 workers: warning: the [bold]last[/bold] batch is small",
        "ddp, 2 workers: done, 24 steps, 1,312 samples/s, validation/accuracy 0.9731, first step after 6.2 s",
    ]


def advanced(done: int, *, time: float, total: int | None = 1200, unit: str = "samples") -> Advanced:
    return Advanced(time=time, what="evaluating", done=done, total=total, unit=unit)


def test_a_pipe_hears_of_what_takes_long_every_ten_seconds() -> None:
    saving = [beat(4, Phase.SAVING, time=10 + second) for second in range(14)]
    steps = [advanced(100 * n, time=24 + 4.0 * n) for n in range(1, 7)]
    mib = Advanced(time=60, what="downloading", done=12_300_000, total=170_000_000, unit="B")

    text = show(opened(), started(), FirstStep(time=2, trial="main"), *saving, *steps, mib, stdout=pipe())

    assert [line.partition(", epoch")[0] for line in text.splitlines()[2:]] == [
        "ddp, 2 workers: step 4/40, saving",
        "ddp, 2 workers: step 4/40, evaluating, 200/1,200 samples",
        "ddp, 2 workers: step 4/40, evaluating, 500/1,200 samples",
        "ddp, 2 workers: step 4/40, downloading, 12.3 MB/170.0 MB",
    ]


def test_a_terminal_shows_a_bar_for_what_takes_long_until_it_is_done() -> None:
    stdout = terminal()
    console = Console(Terminal.on(stdout), trials=[RAY])
    screens = []
    for event in (opened(), started(), advanced(300, time=2), advanced(1200, time=3), metrics(20, time=4)):
        console.receive(event)
        at = len(printed(stdout))
        console._display.live.refresh()  # type: ignore[union-attr]
        screens.append(printed(stdout)[at:])
    console.close()

    assert ["evaluating" in screen for screen in screens] == [False, False, True, False, False]
    assert "300/1,200 samples" in screens[2]
    assert "step 20/40" in screens[4]


def screens(*events: AnyEvent, width: int) -> list[list[str]]:
    """What a terminal shows after each event, without colors."""
    stdout = terminal(width=width, color_system=None)
    console = Console(Terminal.on(stdout), trials=[MAIN])
    console.receive(run_opened())
    found = []
    for event in events:
        console.receive(event)
        live = console._display.live  # type: ignore[union-attr]
        with live._lock:  # type: ignore[union-attr]  # it refreshes itself now and then
            at = len(printed(stdout))
            live.refresh()  # type: ignore[union-attr]
            text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed(stdout)[at:])
        found.append([line.rstrip() for line in text.replace("\r", "\n").splitlines() if line.strip()])
    console.close()
    return found


def run_opened() -> RunOpened:
    return RunOpened(
        time=0, run="r", tracking_uri="u", tracking_experiment="e", tags={}, params={}, trials=("main",),
        directions={"validation/accuracy": "max", "validation/loss": "min"},
    )  # fmt: skip


def beat(step: int, phase: Phase, *, time: float) -> Heartbeat:
    return Heartbeat(time=time, rank=Rank(), pid=1, step=step, phase=phase, idle_s=0)


TRAINED = Trained(time=20, result=end().result)
MIDST = (
    opened(), started(), FirstStep(time=2),
    metrics(1, time=3, train__loss=0.31234, throughput__samples_per_second=1310.4),
    metrics(10, time=4, validation__loss=0.31, validation__accuracy=0.95),
    metrics(20, time=5, validation__loss=0.3, validation__accuracy=0.9312, train__loss=0.2),
    beat(26, Phase.FORWARD, time=11),
)  # fmt: skip


def test_a_wide_terminal_shows_all_of_a_training_and_a_narrow_one_what_matters() -> None:
    *_, wide = screens(*MIDST, width=160)
    bar, training, validation = wide
    assert re.fullmatch(r"\S ddp, 2 workers [━╸╺ ]+ step 25/40, 0:05 left 0:0\d", bar), bar
    assert training == "  epoch 2/2, loss 0.2, 1,310 samples/s"
    assert validation == "  validation/accuracy 0.9312, best 0.95 (epoch 1), validation/loss 0.3"
    *_, narrow = screens(*MIDST, width=80)
    assert re.fullmatch(r"\S ddp, 2 workers [━╸╺ ]+ step 25/40, 0:05 left 0:0\d", narrow[0]), narrow[0]
    assert narrow[1:] == [training, validation]
    *_, narrow = screens(*MIDST, width=60)
    assert narrow[2] == "  validation/accuracy 0.9312, best 0.95 (epoch 1)"


def test_the_end_of_a_training_says_how_long_its_measurements_take() -> None:
    text = show(opened(), started(), TRAINED.model_copy(update={"measuring_s": 38.2}), stdout=pipe())
    assert "ddp, 2 workers: Trained and saved. Measuring the speedup, about 40 s (Ctrl-C keeps the model)\n" in text
    assert "Trained" not in show(opened(), started(), TRAINED, stdout=pipe())


@pytest.mark.parametrize("width", [80, 160])
def test_a_terminal_says_what_is_done_before_between_and_after_the_steps(width: int) -> None:
    building, begun, first, *_, evaluating, over, measuring = screens(
        opened(), beat(0, Phase.BUILDING, time=1), started(), *MIDST[2:], beat(26, Phase.EVALUATING, time=12),
        metrics(40, time=19, train__loss=0.1), TRAINED, width=width,
    )[1:]  # fmt: skip
    assert "ddp, 2 workers: building model and data ... " in building[0]
    assert begun[1].startswith("  waiting for the first batch, 78,186 parameters, ")
    assert len(begun) == 2
    assert re.fullmatch(r"\S ddp, 2 workers +step 0/40 0:0\d", first[0]), first[0]
    assert evaluating[1].startswith("  evaluating, epoch 2/2, ")
    assert "ddp, 2 workers: finishing ... " in over[0]
    assert "ddp, 2 workers: measuring ... " in measuring[0]
    for screen in (over, measuring):
        assert "40/40" not in screen[0]
        assert "40 steps done 0:0" in screen[0]
        assert "left" not in screen[0]
        assert screen[1] == "  loss 0.1, 1,310 samples/s"


@pytest.mark.parametrize("resumes", [True, False], ids=["resumed", "second attempt"])
def test_the_best_value_is_that_of_all_attempts(resumes: bool) -> None:
    before = (run_opened(), opened(), started(), metrics(20, time=4, validation__accuracy=0.95))
    stdout = pipe()
    console = Console(Terminal.on(stdout), trials=[MAIN])
    for event in before:
        console.run.update(event) if resumes else console.receive(event)
    for event in (run_opened(), opened(), started(), metrics(40, time=9, validation__accuracy=0.93)):
        console.receive(event)
    console.close()

    assert "validation/accuracy 0.93, best 0.95 (epoch 1)" in printed(stdout)


def test_a_notebook_gets_plain_lines() -> None:
    stdout = rich.console.Console(file=io.StringIO(), width=160, force_jupyter=True)
    console = Console(Terminal.on(stdout), trials=[MAIN])
    for event in (run_opened(), *MIDST):
        console.receive(event)
    assert console._display is not None
    assert not console._display.has_bar


@pytest.mark.parametrize("width", [80, 40, 20])
def test_the_live_display_fits_a_narrow_terminal(width: int) -> None:
    stdout = terminal(width=width, color_system=None)
    show(opened(), started(), FirstStep(time=2, trial="main"), metrics(5, time=3, train__loss=0.5),
         advanced(300, time=4), stdout=stdout)  # fmt: skip

    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed(stdout)).replace("\r", "\n").splitlines()
    assert lines
    assert max(map(len, lines)) <= width


def test_no_color_means_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    def colours() -> set[str]:
        stdout = rich.console.Console(file=io.StringIO(), width=80, force_terminal=True)
        print_result(result_of_run(rows(), hardware=HARDWARE), terminal=Terminal.on(stdout))
        show(opened(), Warned(time=1, trial="main", message="careful"), stdout=stdout)
        return set(re.findall(r"\x1b\[[0-9;]*3[0-7][0-9;]*m", printed(stdout)))

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert colours()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colours()


def test_quiet_keeps_progress_from_the_terminal_but_no_warning() -> None:
    warnings = pipe()
    places = Terminal(progress=rich.console.Console(quiet=True, file=io.StringIO()), result=pipe(), warnings=warnings)
    console = Console(places, trials=[RAY])
    for event in (opened(), started(), metrics(5, time=2), Warned(time=3, trial="main", message="careful"), end()):
        console.receive(event)
    console.close()

    assert printed(places.progress) == printed(places.result) == ""
    assert printed(warnings) == "ddp, 2 workers: warning: careful\n"


def test_notes_and_warnings_are_one_line_each_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise UsageError("the run is not opened")

    long, stdout = "a text of many words " * 9, pipe()
    Invocation.warn(cast("Any", SimpleNamespace(terminal=Terminal.on(stdout))), long)
    monkeypatch.setattr(invocation, "find_initial", refuse)
    plan = cast("Any", SimpleNamespace(notes=[long], experiment=None))
    with pytest.raises(UsageError), invoked(plan, file=cast("Any", None), terminal=Terminal.on(stdout), verbose=False):
        pass
    assert printed(stdout) == f"{long}\nnote: {long}\n"


def test_many_different_devices_are_counted_instead_of_listed() -> None:
    *_, devices = facts(started(devices=tuple(f"node-{n} cuda:0" for n in range(64))))
    assert devices == "on node-0 cuda:0, node-1 cuda:0 and 62 more"


def test_a_plain_line_has_at_most_120_characters() -> None:
    names = {f"validation__metric_{number}": 0.5 for number in "abcdefgh"}
    text = show(opened(), started(), metrics(5, time=9, train__loss=0.5, **names), stdout=pipe())
    assert "validation/metric_a 0.5" in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_failure_is_left_to_the_command_line() -> None:
    failed = Failed(time=3, trial="main", rank=Rank(), error="ValueError: no", traceback="Traceback ...")
    assert show(opened(), failed, stdout=pipe()) == show(opened(), stdout=pipe())


@pytest.mark.parametrize(
    "last", [end(), Failed(time=3, trial="main", rank=Rank(), error="no", traceback=""), metrics(6, time=3)]
)
def test_a_terminal_gets_its_cursor_back_however_a_trial_ends(last: AnyEvent) -> None:
    stdout = terminal()
    console = Console(Terminal.on(stdout), trials=[RAY])
    for event in (opened(), started(), metrics(5, time=2, train__loss=0.5), last):
        console.receive(event)
    console.close()
    console.close()
    text, hide, restore = printed(stdout), "\x1b[?25l", "\x1b[?25h"
    assert text.count(hide) == text.count(restore) == 1
    assert text.index(hide) < text.index(restore)


def test_a_terminal_says_what_is_waited_for_and_keeps_one_line_of_a_finished_trial() -> None:
    stdout = terminal()
    console = Console(Terminal.on(stdout), trials=[RAY])
    console.receive(opened())
    waiting = printed(stdout)
    console.receive(started())
    console.receive(end())
    assert "starting 2 workers with ray ..." in waiting
    assert "ddp, 2 workers: done, 24 steps, 1,312 samples/s" in printed(stdout).splitlines()[-2]


def test_no_word_of_a_name_is_broken_in_80_columns() -> None:
    header = ("configuration", "devices", "samples/s", "speedup", "scaling efficiency", "est. training time", "loss")
    row = ("1 process, both cores", "2 cores", "123,456", "0.02x (0.01-1.23)", "1% to 62%", "3 min 16 s", "other")
    lines = format_table(Table(header=header, rows=(row,)))
    assert max(map(len, lines)) <= 80
    assert all(word in " ".join(lines).split() for word in (*header[0].split(), *row[0].split()))


@pytest.mark.parametrize(("color", "lines"), [("1", 4), ("", 2)])
def test_an_error_is_wrapped_between_words_on_a_terminal(
    color: str, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", color)  # with which rich takes any stream for a terminal
    monkeypatch.setenv("COLUMNS", "40")
    show_error(ExperimentError([Problem(f"train.{key}", "unknown key; did you mean epochs?") for key in "ab"]))
    shown = capsys.readouterr().err
    assert len(shown.splitlines()) == lines
    assert " ".join(shown.split()) == " ".join(f"error: train.{key}: unknown key; did you mean epochs?" for key in "ab")
    show_error(UsageError("interrupted; continue it with: pipeline run experiments/mlp.yaml --resume"))
    assert len(capsys.readouterr().err.splitlines()) == 1  # so that it can be copied


@pytest.mark.parametrize("width", [80, 60, 40])
def test_large_figures_and_long_names_fit_the_terminal_and_nothing_is_cut(width: int) -> None:
    long = DDP_2.model_copy(update={"variant": "static_graph, bucket_cap_mb=100"})
    slots = {"baseline": in_turn(123_456), "ddp-2": in_turn(234_567)}
    ends = [
        finished(name, spread(each[0]), slots=each, whole_training=10**9, losses=LOSSES) for name, each in slots.items()
    ]
    measured = measure_rows([BASELINE, long], ends)
    lines = format_table(speedup_table(measured, main=find_main(measured)), width=width)
    assert max(map(len, lines)) <= width
    assert "static_graph, bucket_cap_mb=100)" in " ".join("\n".join(lines).split())
    assert not any("…" in line for line in lines)
    assert "234,567" in "\n".join(lines)
    if width == 80:
        assert "1 h 11 min" in "\n".join(lines)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_result_has_the_same_lines_however_narrow_the_terminal_is_said_to_be(is_terminal: bool) -> None:
    narrow, wide = (
        rich.console.Console(file=io.StringIO(), width=width, force_terminal=is_terminal, color_system=None)
        for width in (20, 80)
    )
    for stdout in (narrow, wide):
        print_result(result_of_run(rows(), hardware=HARDWARE), terminal=Terminal.on(stdout))
    assert printed(narrow) == printed(wide)


def test_output_that_is_no_longer_read_does_not_end_a_training() -> None:
    """`pipeline run FILE | head`; rich's console exits."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as pipe:
        console = OptionalConsole(file=pipe)
        os.close(reader)
        console.print("a step")
        console.print("another step")
        pipe.write("the end")  # flushed when the file is closed, as Python does at its end


def test_the_result_alone_goes_to_standard_output() -> None:
    """With --json, too, which is another document."""
    kinds = {(json, quiet): Terminal.of(as_json=json, quiet=quiet) for json in (True, False) for quiet in (True, False)}
    for (as_json, quiet), places in kinds.items():
        assert places.warnings.stderr
        assert places.progress.quiet if quiet else places.progress.stderr
        assert (not places.result.stderr and not places.result.quiet) != as_json


def test_a_warning_is_seen_while_an_export_in_this_process_is_silenced(capsys: pytest.CaptureFixture[str]) -> None:
    places = Terminal.of()
    with redirect_stderr(io.StringIO()):
        write(places.warnings, "MLflow accepts results again.")
    assert capsys.readouterr().err == "MLflow accepts results again.\n"


def test_a_baseline_says_that_it_was_timed() -> None:
    stdout = pipe()
    console = Console(Terminal.on(stdout), trials=[RAY])
    console.receive(opened().model_copy(update={"trial": "baseline", "role": "baseline", "title": "1 worker"}))
    console.receive(finished("baseline", spread(690), metrics={"train/loss": 2.196}))
    assert printed(stdout).splitlines()[-1].endswith("timed, not trained: 690 samples/s, first step after 6.2 s")


# The line with what a command waits for


def test_a_terminal_shows_each_stage_in_one_line_that_goes() -> None:
    console = terminal(color_system=None)
    with stages_on(console):
        begin_stage("reading the experiment")
        assert "reading the experiment ..." in printed(console)
        console.print("note: no GPU here")
        begin_stage("importing torch")
        end_stage()
        told = printed(console)
        console.print("error: no such file")
    assert told.count("\x1b[?25l") == told.count("\x1b[?25h") == 1
    assert told.endswith("\x1b[2K")  # nothing is left of it
    assert "note: no GPU here\n" in told
    assert printed(console).endswith("\x1b[2Kerror: no such file\n")


def test_a_pipe_gets_no_stages() -> None:
    console = pipe()
    with stages_on(console):
        begin_stage("reading the experiment")
    assert printed(console) == ""


def test_who_wants_no_progress_gets_none() -> None:
    console = rich.console.Console(file=io.StringIO(), quiet=True, force_terminal=True)
    with stages_on(console):
        begin_stage("importing torch")
    begin_stage("drawing the report")  # nobody listens
    assert printed(console) == ""
