"""Recorded trainings are compared in pairs that share a seed, and the answer says what luck leaves open."""

# promise: `compare` says which of two experiments is better only where pairs of equal seeds show it

import io
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import rich.console
from recorded_trainings import training
from scipy.stats import ttest_1samp

from pipeline.commands.compare.compared_runs import Question, compare_runs, show_compared
from pipeline.errors import UsageError
from pipeline.record import loss_file
from pipeline.record.run_summary import RunSummary, summarized
from pipeline.report.compared import CLAIM
from pipeline.results.paired import Answer, answer, judge_together


def pairs(folder: Path, first: Sequence[float], second: Sequence[float], name: str = "accuracy") -> list[RunSummary]:
    """Trainings of two variants with seeds 0, 1, ..."""
    return [
        training(folder, f"{lr}-{seed}", seed=seed, lr=lr, metrics={f"validation/{name}": value})
        for lr, values in (("0.1", first), ("0.05", second))
        for seed, value in enumerate(values)
    ]


def text_of(runs: Sequence[RunSummary]) -> list[str]:
    console = rich.console.Console(file=io.StringIO(), width=80, color_system=None)
    show_compared(compare_runs(runs), console=console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_the_answer_is_that_of_a_paired_t_test(tmp_path: Path) -> None:
    first, second = [0.90, 0.91, 0.92, 0.89, 0.95], [0.91, 0.93, 0.925, 0.905, 0.957]
    found = json.loads(compare_runs(pairs(tmp_path, first, second)).to_json())
    interval = ttest_1samp([100 * (b - a) for a, b in zip(first, second, strict=True)], 0).confidence_interval()

    assert (found["verdict"], found["metric"], found["unit"], found["direction"]) == (
        "better", "validation/accuracy", "points", "max",
    )  # fmt: skip
    assert (found["low"], found["high"]) == pytest.approx((interval.low, interval.high))
    assert (found["pairs"], found["seeds"], found["more_pairs"]) == (5, [0, 1, 2, 3, 4], None)
    assert found["configuration"]["optimizer.lr"] == {"a": "0.1", "b": "0.05"}
    assert found["variants"]["B"] == {str(seed): f"0.05-{seed}" for seed in range(5)}


def test_the_text_starts_and_ends_with_the_answer(tmp_path: Path) -> None:
    lines = text_of(pairs(tmp_path, [0.90, 0.91, 0.92, 0.89, 0.95], [0.91, 0.93, 0.925, 0.905, 0.957]))
    said = "B is better than A: validation/accuracy +1.1 points (95% CI +0.38 to +1.9), 5 pairs"
    assert lines[0] == lines[-1] == said
    assert lines[2:4] == ["A  5 runs with seeds 0, 1, 2, 3, 4", "B  5 runs with seeds 0, 1, 2, 3, 4"]
    assert ["0", "0.9", "0.91", "+1"] in [line.split() for line in lines]
    assert CLAIM in " ".join(lines)


@pytest.mark.parametrize(
    ("first", "second", "name", "margin", "verdict", "said"),
    [
        ([0.5, 0.6, 0.7], [0.4, 0.52, 0.59], "loss", None, "better", "B is better than A: validation/loss -0.097 "),
        ([0.5, 0.6, 0.7], [0.4, 0.52, 0.59], "accuracy", None, "worse", "B is worse than A: validation/accuracy -9.7 "),
        ([0.9, 0.91, 0.9], [0.9, 0.92, 0.9], "accuracy", None, "inconclusive", "more would decide"),
        ([0.9, 0.91, 0.9], [0.901, 0.91, 0.9], "accuracy", 0.5, "equal", "A and B are equal within 0.5 points: "),
        ([0.9], [0.95], "accuracy", None, "inconclusive", "Inconclusive: validation/accuracy +5 points, 1 pair"),
        ([0.9] * 3, [0.91] * 3, "accuracy", None, "inconclusive", "+1 points (95% CI +1 to +1), 3 pairs"),
        ([0.9] * 6, [0.91] * 6, "accuracy", None, "better", "B is better than A"),
        ([0.9] * 3, [0.9] * 3, "accuracy", None, "inconclusive", "Inconclusive: validation/accuracy +0 points"),
    ],
)
def test_verdicts(
    tmp_path: Path, first: list[float], second: list[float], name: str, margin: float | None, verdict: str, said: str
) -> None:
    found = compare_runs(pairs(tmp_path, first, second, name), Question(margin=margin))
    assert json.loads(found.to_json())["verdict"] == verdict
    assert said in found.compared.answers[0]


def test_trainings_with_the_same_losses_are_identical(tmp_path: Path) -> None:
    runs = [
        training(tmp_path, f"{lr}-{seed}", seed=seed, lr=lr, losses=(1.0, 0.5 + seed))
        for lr in ("0.1", "0.05")
        for seed in range(2)
    ]
    assert compare_runs(runs).compared.answers == ("A and B are identical: the same losses to the bit in all 2 pairs",)


def test_pairs_that_would_decide_do(tmp_path: Path) -> None:
    first, second = [0.90, 0.91, 0.92], [0.92, 0.91, 0.93]
    found = compare_runs(pairs(tmp_path, first, second)).compared.others[0].answer
    assert found is not None
    assert found.more_pairs is not None
    enough = ttest_1samp(list(found.differences) * 40, 0)
    assert enough.pvalue < 0.05
    size = 3 + found.more_pairs
    half = (found.high or 0) - found.difference
    assert half * math.sqrt(3 / size) < found.difference * 4.3 / 1.96  # Student's t becomes narrower, too


def test_what_does_not_count_is_named(tmp_path: Path) -> None:
    runs = [
        training(tmp_path, "a0", seed=0, began=1.0e9), training(tmp_path, "a0-again", seed=0, began=1.1e9),
        training(tmp_path, "a1", seed=1), training(tmp_path, "a2", seed=2), training(tmp_path, "a3", seed=3),
        training(tmp_path, "b0", seed=0, lr="1", data="d2"),
        training(tmp_path, "b1", seed=1, lr="1", metrics={"validation/accuracy": math.nan}),
        training(tmp_path, "b2", seed=2, lr="1", status="FAILED"),
    ]  # fmt: skip
    found = compare_runs(runs)
    assert set(found.compared.notes) == {
        "a0 is left out: a0-again has the same seed and is newer",
        "seed 3 of A has no partner in B",
        "seed 1 does not count: validation/accuracy of b1 is nan",
        "seed 2 does not count: b2 did not complete",
        "A and B train on different data, e.g. with seed 0",
    }
    assert found.compared.others[0].answer is not None
    assert found.compared.others[0].answer.seeds == (0,)


def test_the_metric_is_that_of_the_best_checkpoint_on_the_test_set(tmp_path: Path) -> None:
    metrics = {"validation/accuracy": 0.9, "validation/loss": 0.3, "test/accuracy": 0.8, "test/loss": 0.4}
    for name, lr in (("a", "1"), ("b", "2")):
        training(tmp_path, name, seed=0, lr=lr, metrics=metrics, params={"checkpoint.best": "validation/accuracy"})
    runs = [found for name in "ab" if (found := summarized(tmp_path / name)) is not None]
    assert json.loads(compare_runs(runs).to_json())["metric"] == "test/accuracy"
    asked = {"loss": "test/loss", "validation/loss": "validation/loss"}
    assert {name: json.loads(compare_runs(runs, Question(metric=name)).to_json())["metric"] for name in asked} == asked
    with pytest.raises(UsageError, match=r"--metric acuracy: there is no such metric; did you mean .*/accuracy\?"):
        compare_runs(runs, Question(metric="acuracy"))


def test_two_runs_are_two_variants_and_more_of_one_kind_are_refused(tmp_path: Path) -> None:
    runs = [training(tmp_path, name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    assert json.loads(compare_runs(runs[:2]).to_json())["variants"] == {"A": {"0": "a"}, "B": {"0": "b"}}
    with pytest.raises(UsageError, match="all 3 runs have the same settings but for the seed"):
        compare_runs(runs)
    apart = compare_runs([runs[0], runs[2]])
    assert apart.compared.answers == ()
    assert "have no answer" in apart.compared.notes[-1]


def test_what_is_no_training_is_shown_without_an_answer(tmp_path: Path) -> None:
    runs = [training(tmp_path, "a", seed=0), training(tmp_path, "b", seed=0, role="benchmark")]
    found = json.loads(compare_runs(runs).to_json())
    assert (found["verdict"], found["results"]["command"]) == (None, {"a": "run", "b": "benchmark"})
    with pytest.raises(UsageError, match=r"b is a benchmark\. More than two runs can only be compared if all"):
        compare_runs([*runs, training(tmp_path, "c", seed=1)])


def answered(mean: float, metric: str = "m") -> Answer:
    values = {seed: (0.0, mean + 0.1 * (-1) ** seed) for seed in range(6)}
    return answer(values, metric=metric, direction="min", is_rate=False)


def test_keys_that_decide_nothing_divide_no_variant(tmp_path: Path) -> None:
    runs = pairs(tmp_path, [0.9, 0.91], [0.8, 0.81])
    aside = {"loader.num_workers": "2", "checkpoint.directory": "d", "train.log_every_steps": "9", "train.ema": "null"}
    runs.append(training(tmp_path, "again", seed=2, lr="0.1", params=aside))
    found = json.loads(compare_runs(runs).to_json())
    assert list(found["variants"]) == ["A", "B"]
    assert list(found["variants"]["A"]) == ["0", "1", "2"]


def test_a_run_that_failed_does_not_replace_a_complete_one(tmp_path: Path) -> None:
    runs = pairs(tmp_path, [0.9, 0.91], [0.8, 0.83])
    runs.append(training(tmp_path, "failed", seed=0, lr="0.1", status="FAILED", began=1.8e9))
    found = compare_runs(runs)
    assert found.compared.first.runs[0] == "0.1-0"
    assert found.compared.notes == ("failed is left out: 0.1-0 has the same seed and completed",)


def test_a_first_run_that_failed_leaves_the_others_their_answer(tmp_path: Path) -> None:
    runs = [training(tmp_path, "failed", seed=0, lr="0.1", status="FAILED")]
    runs += [training(tmp_path, f"{lr}-{seed}", seed=seed, lr=lr) for lr in ("0.1", "0.05") for seed in (1, 2)]
    found = compare_runs(runs).compared.others[0].answer
    assert found is not None
    assert found.seeds == (1, 2)


def test_a_test_set_that_not_all_have_is_not_compared(tmp_path: Path) -> None:
    both = {"validation/accuracy": 0.9, "test/accuracy": 0.8}
    runs = [training(tmp_path, "a", seed=0, lr="1", metrics=both), training(tmp_path, "b", seed=0, lr="2")]
    assert json.loads(compare_runs(runs).to_json())["metric"] == "validation/accuracy"


def test_rounding_is_no_spread(tmp_path: Path) -> None:
    found = compare_runs(pairs(tmp_path, [0.81, 0.82, 0.8], [0.82, 0.83, 0.81]))
    assert found.compared.answers[0].startswith("Inconclusive: ")
    assert "all pairs have the same difference. Enough pairs make that an answer: six at 95%" in found.compared.notes


def test_a_damaged_file_of_losses_is_none(tmp_path: Path) -> None:
    for content in (b"x" * 133, b"\x93NUMPY" + bytes(200)):
        (tmp_path / "losses.npy").write_bytes(content)
        assert loss_file.read(tmp_path) == ()


def test_skewed_differences_are_warned_of(tmp_path: Path) -> None:
    even, leaning = [0.1, -0.1, 0.2, -0.2, 0.15, -0.15, 0.05, -0.05], [0.0, 0.01, 0.02, 0.0, 0.01, 0.03, 0.0, 0.4]
    for name, second in (("even", even), ("leaning", leaning)):
        notes = compare_runs(pairs(tmp_path / name, [0.0] * 8, second, "loss")).compared.notes
        assert any("skewed" in note for note in notes) == (name == "leaning")


def test_several_variants_hold_together() -> None:
    """The clearest answer has the interval of 0.05 / 3; what is clear alone may not be so beside others."""
    alone = [answered(mean) for mean in (0.115, -2.0, 0.02)]
    together = judge_together(alone)
    assert [one.verdict for one in alone] == ["worse", "better", "inconclusive"]
    assert [one.verdict for one in together] == ["inconclusive", "better", "inconclusive"]
    expected = ttest_1samp(alone[1].differences, 0).confidence_interval(1 - 0.05 / 3)
    assert (together[1].low, together[1].high) == pytest.approx((expected.low, expected.high))
    assert all(one.low is not None and one.low < 0 for one in (together[0], together[2]))


def test_a_seed_that_is_no_number_is_not_taken_for_another(tmp_path: Path) -> None:
    runs = [training(tmp_path, "a", seed=0, lr="1"), training(tmp_path, "b", seed=0, lr="2", params={"seed": "null"})]
    with pytest.raises(UsageError, match="b cannot be compared: its seed is 'null', not a number"):
        compare_runs(runs)
