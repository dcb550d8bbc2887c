"""A study's record, its answer from the folder alone, and its plan."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from recorded_trainings import training

from pipeline.commands.compare.compared_runs import Question
from pipeline.commands.compare.study_answer import compare_study
from pipeline.commands.compare.study_plan import describe_study, make_study
from pipeline.commands.compare.study_record import Looks, StudyRecord, find_differing
from pipeline.commands.study_trials.assignment import Record
from pipeline.errors import ExperimentError, UsageError
from pipeline.experiment.variant_files import read_variants
from pipeline.report.screens import format_screen
from pipeline.report.screens.screen_layout import Places

INPROCESS = ("parallel.strategy=single", "parallel.launcher=inprocess", "parallel.workers=1")
MLP = str(Path(__file__).parents[2] / "experiments" / "mlp.yaml")


def record(*looks: Looks, question: Question = Question()) -> StudyRecord:  # noqa: B008 - frozen
    settings = {"A": {"name": "digits", "optimizer.lr": "0.1"}, "B": {"name": "digits", "optimizer.lr": "0.2"}}
    descriptions = {"A": "optimizer.lr=0.1", "B": "optimizer.lr=0.2"}
    return StudyRecord(
        question=question,
        descriptions=descriptions,
        settings=settings,
        is_alone=False,
        looks=looks or (Looks(pairs=(3,)),),
    )


def study(folder: Path, kept: StudyRecord, values: Mapping[int, tuple[float, float | None]]) -> Path:
    """A study whose trainings have these accuracies by seed; None: it failed."""
    folder = folder / "20261101-digits-study-1"
    folder.mkdir()
    kept.keep(folder)
    number = 0
    for seed, both in values.items():
        for name, value in zip("AB", both, strict=True):
            number += 1
            metrics = {} if value is None else {"validation/accuracy": value}
            training(folder, f"trial-{number:03}", seed=seed, lr=name, metrics=metrics,
                     status="FAILED" if value is None else "FINISHED")  # fmt: skip
            Record(number=number, values={"seed": seed}, variant=name).keep(folder / f"trial-{number:03}")
    return folder


def test_an_extension_trains_more_and_has_a_wider_interval() -> None:
    first = record(Looks(pairs=(5,)))
    assert first.confidence == pytest.approx(0.95)
    assert first.extend((7,)).looks == (Looks(pairs=(7,)),)  # its answer was never printed
    answered = first.mark_answered(5)
    with pytest.raises(
        UsageError, match=r"has its answer from 5 pairs\. For more pairs, use --seeds, e\.g\. --seeds 10"
    ):
        answered.extend((5,))
    assert answered.extend((5,), has_failures=True).looks[1].pairs == (5,)
    seen = record(Looks(pairs=(5, 7))).mark_seen()
    assert seen.extend((5, 7)) == seen
    with pytest.raises(UsageError, match="was looked at already"):
        seen.extend((5,))
    extended = answered.extend((5, 7, 10))
    assert extended.looks[1].pairs == (7, 10)
    assert extended.confidence == pytest.approx(1 - 0.0125 / 2)
    early = record(Looks(pairs=(5, 7, 10))).mark_answered(5)
    assert early.last_look(9) == 5
    assert early.extend((8,)).looks[1].pairs == (8,)
    assert [record(Looks(pairs=(5, 7))).last_look(ended) for ended in (4, 5, 6, 7)] == [None, 5, 5, 7]


def test_a_record_is_read_as_it_was_kept(tmp_path: Path) -> None:
    kept = record(question=Question(metric="loss", margin=0.5)).mark_answered(3)
    kept.keep(tmp_path)
    assert StudyRecord.read(tmp_path) == kept
    (tmp_path / "study.json").write_text("{")
    with pytest.raises(UsageError, match="can't be read, so the study can't be continued"):
        StudyRecord.read(tmp_path)


def test_the_answer_of_a_folder(tmp_path: Path) -> None:
    folder = study(tmp_path, record(), {3: (0.9, 0.8), 4: (0.91, 0.83), 5: (0.92, None)})
    found = compare_study(folder)
    assert found.others[0].answer is not None
    assert found.others[0].answer.seeds == (3, 4)
    assert "seed 5 does not count: 20261101-digits-study-1/trial-006 did not complete" in found.notes
    assert found.left == 0
    assert found.settings == {"optimizer.lr": ("0.1", "0.2")}
    assert found.tags == {"verdict": "inconclusive", "difference": "-9 points", "pairs": "2"}
    assert found.answers[0].endswith("would decide: --seeds 4 --resume 1")

    screen = format_screen(found, Places(folder="f", run="latest", page="f/report.html"))
    assert len(screen) <= 24
    assert max(map(len, screen)) <= 80
    assert screen[0].startswith("Inconclusive: validation/accuracy -9 points")
    assert screen[-1].endswith("would decide: --seeds 4 --resume 1")
    assert "A        optimizer.lr=0.1" in screen
    assert "| 3 | 0.9 | 0.8 | -10 |" in found.markdown()


def test_a_study_without_a_whole_pair_has_no_answer(tmp_path: Path) -> None:
    found = compare_study(study(tmp_path, record(), {}))
    assert (found.answers, found.verdict, found.left) == ((), "No pair of trainings can be compared", 6)
    assert found.to_mapping()["verdict"] is None


def test_there_is_no_answer_between_looks(tmp_path: Path) -> None:
    """Ctrl-C, a look, and a resumed study would be a look that nobody has planned."""
    folder = study(tmp_path, record(Looks(pairs=(3, 5))), {3: (0.9, 0.8), 4: (0.91, 0.83)})
    found = compare_study(folder)
    assert (found.answers, found.left) == ((), 2)
    assert "2 of 3 pairs are complete. The answer comes after all of them" in found.notes
    (tmp_path / "more").mkdir()
    values = {seed: (0.9, 0.8 - seed / 100) for seed in range(4)}
    answer = compare_study(study(tmp_path / "more", record(Looks(pairs=(3, 5))), values)).others[0].answer
    assert answer is not None
    assert answer.seeds == (0, 1, 2)


def test_a_training_that_never_started_is_named(tmp_path: Path) -> None:
    folder = study(tmp_path, record(Looks(pairs=(2,))), {3: (0.9, 0.8)})
    for number, name in ((3, "B"), (4, "A")):
        failed = Record(number=number, values={"seed": 4}, variant=name, failure="its process was killed")
        failed.keep(folder / f"trial-{number:03}")
    found = compare_study(folder)
    assert "B, seed 4 does not count: its process was killed" in found.notes
    assert found.others[0].answer is not None


def test_a_metric_that_the_trainings_do_not_have_costs_no_answer(tmp_path: Path) -> None:
    folder = study(tmp_path, record(question=Question(metric="recall")), dict.fromkeys(range(3), (0.9, 0.8)))
    found = compare_study(folder)
    assert "--metric recall: there is no such metric; the runs have validation/accuracy in common" in found.notes
    assert found.others[0].answer is not None


def test_repeated_looks_widen_the_interval(tmp_path: Path) -> None:
    values = {seed: (0.9, 0.9 + 0.001 * seed) for seed in range(5)}
    widths = []
    for name, looks in (("once", (5,)), ("often", (5, 7, 10))):
        (tmp_path / name).mkdir()
        found = compare_study(study(tmp_path / name, record(Looks(pairs=looks)), values))
        answer = found.others[0].answer
        assert answer is not None
        assert answer.low is not None
        widths.append(answer.difference - answer.low)
        assert any("looked at after 5, 7, 10 pairs" in note for note in found.notes) == (name == "often")
    assert widths[0] < widths[1]


def test_a_plan_alternates_and_pairs_seeds() -> None:
    variants = read_variants([MLP], ["seed=5", *INPROCESS], vary="optimizer.lr=0.1,0.2")
    plan = make_study(variants, Question(), pairs=3, is_timed=False)
    assert [one.title for one in plan.trainings(2)] == ["A, seed 5", "B, seed 5", "B, seed 6", "A, seed 6"]
    assert plan.trainings(1) == plan.trainings(3)[:2]  # an extension keeps what is there
    assert (plan.metric, plan.direction, plan.is_alone) == ("validation/loss", "min", False)
    assert "optimizer.lr=0.2" in describe_study(plan, looks=(3,))
    alone = make_study(variants, Question(), pairs=3, is_timed=True)
    assert (alone.is_alone, alone.concurrent) == (True, 1)


def test_variants_with_other_workers_run_alone() -> None:
    variants = read_variants([MLP], INPROCESS, vary="parallel.cpus_per_worker=1,2")
    assert make_study(variants, Question(), pairs=2, is_timed=False).is_alone


@pytest.mark.parametrize(
    ("vary", "question", "message"),
    [
        ("seed=1,2", Question(), "the variants have the same settings"),
        ("optimizer.lr=0.1,0.2", Question(metric="acuracy"), "--metric acuracy: .* did you mean accuracy"),
    ],
)
def test_what_can_not_be_compared_is_refused(vary: str, question: Question, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_study(read_variants([MLP], INPROCESS, vary=vary), question, pairs=2, is_timed=False)


def test_a_variant_that_is_wrong_has_its_place() -> None:
    variants = read_variants([MLP], INPROCESS, vary="optimizer.lr=0.1,0.2 loss._target_=torch.nn.Nothing")
    with pytest.raises(ExperimentError, match=r"loss\._target_"):
        make_study(variants, Question(), pairs=2, is_timed=False)


def test_settings_that_differ() -> None:
    assert find_differing([{"a": "1", "b": "2", "seed": "1"}, {"a": "1", "c": "3", "seed": "2"}]) == {
        "b": ("2", None), "c": (None, "3"),
    }  # fmt: skip
