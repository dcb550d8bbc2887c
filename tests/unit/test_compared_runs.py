"""Recorded trainings are compared in pairs that share a seed, and the answer says what luck leaves open."""

# promise: `compare` says which of two experiments is better only where pairs of equal seeds show it

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from samples import finished, spread
from scipy.stats import ttest_1samp
from screens import check, shown

from pipeline.commands.compared_runs import Question, compare_runs
from pipeline.errors import UsageError
from pipeline.protocol.events import Metrics, Point, RunClosed, RunOpened, Started
from pipeline.protocol.trial import Status
from pipeline.record import loss_file
from pipeline.record.recorder import Recorder
from pipeline.record.runs import RunSummary, summarize_run
from pipeline.results import record
from pipeline.results.paired import Answer, answer, judge_together
from pipeline.results.record import Fact, Result
from pipeline.results.texts import CLAIM, NO_PARTNER, SAME_DIFFERENCE

ACCURACY = {"metrics.accuracy._target_": "torchmetrics.classification.MulticlassAccuracy"}


def training(
    folder: Path,
    name: str,
    *,
    seed: int,
    lr: str = "0.1",
    metrics: Mapping[str, float] = {"validation/accuracy": 0.9},
    losses: Sequence[float] = (),
    data: str = "d1",
    status: Status = "FINISHED",
    role: str = "main",
    began: float = 1.7e9,
    params: Mapping[str, str] = {},
    evaluations: Sequence[float] = (),
    step_s: float = 1.0,
    workers: int = 1,
) -> RunSummary:
    """Record a training without training; each of its ``evaluations``, of accuracy, is after a step of 8 samples."""
    place = folder / name
    place.mkdir(parents=True)
    settings = {"name": "digits", "seed": str(seed), "optimizer.lr": lr, "tracking.uri": name, **ACCURACY, **params}
    tags = {"role": role, "strategy": "single", "world_size": str(workers)}
    with closing(Recorder(place, subscribers=[])) as recorder:
        recorder.receive(
            RunOpened(time=began, run=name, tracking_uri="u", tracking_experiment="digits", tags=tags, params=settings,
                      trials=("main",), directions={"validation/accuracy": "max", "validation/loss": "min"})
        )  # fmt: skip
        recorder.receive(
            Started(trial="main", total_steps=1, steps_per_epoch=1, epochs=1, train_samples=8, epoch_samples=8,
                    validation_samples=1,
                    parameters=1, devices=(), data_name="d", data_digest=data)
        )  # fmt: skip
        for step, value in enumerate(evaluations, 1):
            pace = Point("time/step_ms", step, 1000 * step_s)
            recorder.receive(Metrics(step=step, epoch=1, steps=1, points=(pace,)))
            recorder.receive(Metrics(step=step, epoch=1, points=(Point("validation/accuracy", step, value),)))
        if status == "FINISHED":
            recorder.receive(finished("main", spread(100), metrics=dict(metrics)))
        recorder.receive(RunClosed(time=began + 60, status=status, message="" if status == "FINISHED" else "why"))
    if losses:
        loss_file.write(place, losses, first=1)
    found = summarize_run(place)
    assert found is not None
    return found


def pairs(folder: Path, *values: Sequence[float], name: str = "accuracy") -> list[RunSummary]:
    """Trainings of variants with seeds 0, 1, ..."""
    return [
        training(folder, f"{lr}-{seed}", seed=seed, lr=lr, metrics={f"validation/{name}": value})
        for lr, found in zip(("0.1", "0.05", "0.02", "0.01", "0.4"), values, strict=False)
        for seed, value in enumerate(found)
    ]


def fact(result: Result, key: str = "difference") -> Fact:
    found = result.fact(key)
    assert found is not None
    return found


def differing(result: Result) -> dict[str, tuple[str, ...]]:
    """What differs between A and B, as text."""
    (table,) = (table for table in result.tables if table.title == "What differs between A and B")
    return {str(name): tuple(map(str, cells)) for name, *cells in table.rows}


FIRST, SECOND = [0.90, 0.91, 0.92, 0.89, 0.95], [0.91, 0.93, 0.925, 0.905, 0.957]


def test_the_answer_is_that_of_a_paired_t_test(tmp_path: Path) -> None:
    found = compare_runs(pairs(tmp_path, FIRST, SECOND))
    interval = ttest_1samp([100 * (b - a) for a, b in zip(FIRST, SECOND, strict=True)], 0).confidence_interval()
    difference = fact(found)
    assert (difference.low, difference.high) == pytest.approx((interval.low, interval.high))
    assert (found.answer, found.state, difference.unit, fact(found, "pairs").value) == ("better", "ok", "points", 5)
    assert found.verdict == "B is better than A: validation/accuracy +1.1 points (95% CI +0.38 to +1.9), 5 pairs"
    assert record.mlflow_tags(found)["main"] == {
        "verdict": "better", "difference": "+1.1 points (+0.38 to +1.9)", "pairs": "5",
    }  # fmt: skip
    value = found.fact("validation/accuracy", trial="0.05-1")
    assert value is not None
    assert value.value == 0.93


@pytest.mark.parametrize(
    ("first", "second", "name", "margin", "answered", "said"),
    [
        ([0.5, 0.6, 0.7], [0.4, 0.52, 0.59], "loss", None, "better", "B is better than A: validation/loss -0.097 "),
        ([0.5, 0.6, 0.7], [0.4, 0.52, 0.59], "accuracy", None, "worse", "B is worse than A: validation/accuracy -9.7 "),
        ([0.9, 0.91, 0.9], [0.9, 0.92, 0.9], "accuracy", None, "inconclusive", "more would decide"),
        ([0.9, 0.91, 0.9], [0.901, 0.91, 0.9], "accuracy", 0.5, "equal", "A and B are equal within 0.5 points: "),
        ([0.9], [0.95], "accuracy", None, "inconclusive", "better than A: validation/accuracy +5 points, 1 pair"),
        ([0.9] * 3, [0.91] * 3, "accuracy", None, "inconclusive", "+1 points (95% CI +1 to +1), 3 pairs"),
        ([0.9] * 6, [0.91] * 6, "accuracy", None, "better", "B is better than A"),
        ([0.9] * 3, [0.9] * 3, "accuracy", None, "inconclusive", "than A: validation/accuracy +0 points"),
    ],
)
def test_answers(
    tmp_path: Path, first: list[float], second: list[float], name: str, margin: float | None, answered: str, said: str
) -> None:
    found = compare_runs(pairs(tmp_path, first, second, name=name), Question(margin=margin))
    assert (found.answer, fact(found).state == "inconclusive") == (answered, answered == "inconclusive")
    assert said in found.verdict


@pytest.mark.parametrize(
    ("apart", "answered", "said"),
    [
        (0.0, "identical", "A and B are identical: the same losses to the bit, 2 pairs"),
        (2e-8, "identical",
         "A and B are identical but for rounding: no loss and no validation/accuracy differs by more"),
        (1e-3, "inconclusive", "Inconclusive whether B is better than A"),
    ],
)  # fmt: skip
def test_trainings_with_the_same_losses_are_identical(tmp_path: Path, apart: float, answered: str, said: str) -> None:
    runs = [
        training(tmp_path, f"{lr}-{seed}", seed=seed, lr=lr, losses=(1.0, (0.5 + seed) * (1 + apart * index)),
                 metrics={"validation/accuracy": 0.9 * (1 + apart * index)})
        for index, lr in enumerate(("0.1", "0.05"))
        for seed in range(2)
    ]  # fmt: skip
    found = compare_runs(runs)
    assert (found.answer, found.verdict[: len(said)]) == (answered, said)


def test_pairs_that_would_decide_do() -> None:
    found = answer({0: (0.90, 0.92), 1: (0.91, 0.91), 2: (0.92, 0.93)}, metric="m", direction="max", is_rate=True)
    assert found.more_pairs is not None
    assert ttest_1samp(list(found.differences) * 40, 0).pvalue < 0.05
    half = found.found.high - found.found.value
    assert half * math.sqrt(3 / (3 + found.more_pairs)) < found.found.value * 4.3 / 1.96  # the quantile falls, too


def test_what_does_not_count_is_named(tmp_path: Path) -> None:
    runs = [
        training(tmp_path, "a0", seed=0, began=1.0e9), training(tmp_path, "a0-again", seed=0, began=1.1e9),
        training(tmp_path, "a1", seed=1), training(tmp_path, "a2", seed=2), training(tmp_path, "a3", seed=3),
        training(tmp_path, "b0", seed=0, lr="1", data="d2"),
        training(tmp_path, "b1", seed=1, lr="1", metrics={"validation/accuracy": math.nan}),
        training(tmp_path, "b2", seed=2, lr="1", status="FAILED"),
    ]  # fmt: skip
    found = compare_runs(runs)
    assert set(found.notes) == {
        CLAIM,
        "a0 is left out: a0-again has the same seed and is newer",
        "seed 3 of A has no partner in B",
        "seed 1 does not count: validation/accuracy of b1 is nan",
        "seed 2 does not count: b2 did not complete",
        "A and B train on different data, e.g. with seed 0",
    }
    assert fact(found, "pairs").value == 1
    assert differing(found)["data digest"] == ("d1", "d2")


def test_the_metric_is_that_of_the_best_checkpoint_on_the_test_set(tmp_path: Path) -> None:
    metrics = {"validation/accuracy": 0.9, "validation/loss": 0.3, "test/accuracy": 0.8, "test/loss": 0.4}
    for name, lr in (("a", "1"), ("b", "2")):
        training(tmp_path, name, seed=0, lr=lr, metrics=metrics, params={"checkpoint.best": "validation/accuracy"})
    runs = [found for name in "ab" if (found := summarize_run(tmp_path / name)) is not None]
    assert "test/accuracy" in compare_runs(runs).verdict
    for asked, metric in {"loss": "test/loss", "validation/loss": "validation/loss"}.items():
        assert f" {metric} " in compare_runs(runs, Question(metric=asked)).verdict
    with pytest.raises(UsageError, match=r"--metric acuracy: there is no such metric; did you mean .*/accuracy\?"):
        compare_runs(runs, Question(metric="acuracy"))
    alone = training(tmp_path, "c", seed=0, lr="3")  # a test set that not all have is not compared
    assert "validation/accuracy" in compare_runs([runs[0], alone]).verdict


def test_two_runs_are_two_variants_and_more_of_one_kind_are_refused(tmp_path: Path) -> None:
    runs = [training(tmp_path, name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    assert compare_runs(runs[:2]).headline[1:] == ("A  a", "B  b")
    with pytest.raises(UsageError, match="all 3 runs have the same settings but for the seed"):
        compare_runs(runs)
    unseeded = training(tmp_path, "d", seed=0, lr="2", params={"seed": "null"})
    with pytest.raises(UsageError, match="d cannot be compared: its seed is 'null', not a number"):
        compare_runs([runs[0], unseeded])
    apart = compare_runs([runs[0], runs[2]])
    assert (apart.answer, apart.verdict) == ("none", "No pair of trainings can be compared")
    assert NO_PARTNER in apart.notes


def test_what_is_no_training_is_shown_without_an_answer(tmp_path: Path) -> None:
    runs = [training(tmp_path, "a", seed=0), training(tmp_path, "b", seed=0, role="benchmark")]
    assert differing(compare_runs(runs))["command"] == ("run", "benchmark")
    with pytest.raises(UsageError, match=r"b is a benchmark\. More than two runs can only be compared if all"):
        compare_runs([*runs, training(tmp_path, "c", seed=1)])
    with pytest.raises(UsageError, match="not all of these runs are trainings"):
        compare_runs(runs, Question(metric="loss"))


def test_what_differs_is_listed_and_nothing_else(tmp_path: Path) -> None:
    """Numbers of two results are a loop over both; a run without a result has those of its journal."""
    runs = [training(tmp_path, name, seed=1, metrics={"validation/accuracy": value}, params={"train.epochs": epochs})
            for name, value, epochs in (("a", 0.9, "5"), ("b", 0.8, "9"))]  # fmt: skip
    known: dict[str, Any] = {"kind": "run", "name": "digits", "title": "", "headline": (), "verdict": ""}
    for run, rate, version in zip(runs, (190, 380), ("2.3.4", "2.4.0"), strict=True):
        (run.folder / "environment.txt").write_text(f"# python 3.11.7, Linux\nnumpy=={version}\ntorch==2.13.0\n")
        facts = (Fact(key="rate", value=rate, unit="samples/s"), Fact(key="speedup", value=1.5, unit="x"))
        record.save(Result(**known, facts=facts), run.folder)
    assert differing(compare_runs(runs)) == {
        "validation/accuracy": ("0.9", "0.8"), "rate": ("190", "380"), "train.epochs": ("5", "9"),
        "tracking.uri": ("a", "b"), "numpy": ("2.3.4", "2.4.0"),
    }  # fmt: skip
    (runs[0].folder / record.FILE_NAME).write_text("{}")
    assert "result.json is damaged" in differing(compare_runs(runs))["result"][0]


def answered(mean: float) -> Answer:
    values = {seed: (0.0, mean + 0.1 * (-1) ** seed) for seed in range(6)}
    return answer(values, metric="m", direction="min", is_rate=False)


def test_several_variants_hold_together() -> None:
    """The clearest answer has the interval of 0.05 / 3; what is clear alone may not be so beside others."""
    alone = [answered(mean) for mean in (0.115, -2.0, 0.02)]
    together = judge_together(alone)
    assert [one.verdict for one in alone] == ["worse", "better", "inconclusive"]
    assert [one.verdict for one in together] == ["inconclusive", "better", "inconclusive"]
    expected = ttest_1samp(alone[1].differences, 0).confidence_interval(1 - 0.05 / 3)
    assert together[1].found[1:3] == pytest.approx((expected.low, expected.high))
    assert all(one.found.low < 0 for one in (together[0], together[2]))


def test_keys_that_decide_nothing_divide_no_variant_and_a_failed_run_costs_no_answer(tmp_path: Path) -> None:
    runs = pairs(tmp_path, [0.9, 0.91], [0.8, 0.83])
    aside = {"loader.num_workers": "2", "checkpoint.directory": "d", "train.log_every_steps": "9", "train.ema": "null"}
    runs.append(training(tmp_path, "again", seed=2, lr="0.1", params=aside))
    assert compare_runs(runs).headline[1:] == ("A  optimizer.lr=0.1", "B  optimizer.lr=0.05")
    first = training(tmp_path, "first", seed=5, lr="0.1", status="FAILED")
    found = compare_runs([first, *runs, training(tmp_path, "failed", seed=0, lr="0.1", status="FAILED", began=1.8e9)])
    assert fact(found, "pairs").value == 2
    assert "failed is left out: 0.1-0 has the same seed and completed" in found.notes


def test_a_damaged_file_of_losses_is_none(tmp_path: Path) -> None:
    for content in (b"x" * 133, b"\x93NUMPY" + bytes(200)):
        (tmp_path / "losses.npy").write_bytes(content)
        assert loss_file.read(tmp_path) == ()


def test_skewed_differences_and_equal_ones_are_warned_of(tmp_path: Path) -> None:
    even, leaning = [0.1, -0.1, 0.2, -0.2, 0.15, -0.15, 0.05, -0.05], [0.0, 0.01, 0.02, 0.0, 0.01, 0.03, 0.0, 0.4]
    for name, second in (("even", even), ("leaning", leaning)):
        notes = compare_runs(pairs(tmp_path / name, [0.0] * 8, second, name="loss")).notes
        assert any("skewed" in note for note in notes) == (name == "leaning")
    rounding = compare_runs(pairs(tmp_path / "rounding", [0.81, 0.82, 0.8], [0.82, 0.83, 0.81]))  # which is no spread
    assert (rounding.answer, SAME_DIFFERENCE in rounding.notes) == ("inconclusive", True)


@pytest.mark.parametrize("name", ["compared_runs", "compared_pairs", "compared_variants"])
def test_a_screen_has_this_text(tmp_path: Path, name: str) -> None:
    worse, alike, far = [value - 0.2 for value in SECOND], [0.9, 0.911, 0.91, 0.9, 0.949], [0.1, 0.2, 0.1, 0.2, 0.3]
    values = [FIRST, SECOND, worse, alike, far]
    runs = pairs(tmp_path, *values[: {"compared_runs": 2, "compared_pairs": 2, "compared_variants": 5}[name]])
    check(name, shown(compare_runs(runs[:6:5] if name == "compared_runs" else runs)))


def test_the_screen_of_a_time_to_target_has_this_text(tmp_path: Path) -> None:
    """The second variant makes a step in half the time, on twice the devices, and needs about a tenth more steps."""
    runs = [
        training(tmp_path, f"{name}-{seed}", seed=seed, lr=name, workers=workers, step_s=step_s * (1 + 0.02 * seed),
                 evaluations=[0.1 * (step - 0.1 * seed) / slower for step in range(1, 13)],
                 metrics={"validation/accuracy": 0.9 + 0.01 * seed})
        for name, workers, step_s, slower in (("0.1", 1, 2.0, 1.0), ("0.2", 2, 1.0, 1.1))
        for seed in range(4)
    ]  # fmt: skip
    found = compare_runs(runs, Question(is_timed=True, target=0.8))
    ratios = [fact(found, f"target_{name}").value for name in ("sooner", "rate", "samples", "hours")]
    assert ratios == pytest.approx([2 / 1.1, 2, 1.1, 1.1], rel=0.02)
    check("compared_time", shown(found))
