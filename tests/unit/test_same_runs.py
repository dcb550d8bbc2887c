"""A comparison takes the runs that are there, and trains the others: in pairs, in turn, and never twice."""

# promise: `compare` takes a recorded run for a training only if experiment, code, packages and hardware are the same

import os
from contextlib import closing
from pathlib import Path

import pytest

from pipeline.commands import compare
from pipeline.commands.compare import Comparison, Origin, Same, find_same, plan_comparison
from pipeline.commands.compared_runs import Question
from pipeline.errors import ExperimentError, ResourceError, UsageError
from pipeline.experiment.load import ExperimentFile, flatten, load, read_variants
from pipeline.protocol.events import RunClosed, RunOpened
from pipeline.protocol.trial import Status
from pipeline.record.journal import FILE_NAME, Journal
from pipeline.results import record
from pipeline.results.record import Fact, Result

INPROCESS = ("parallel.strategy=single", "parallel.launcher=inprocess", "parallel.workers=1")
MLP = str(Path(__file__).parents[2] / "experiments" / "mlp.yaml")
HARDWARE, PACKAGES = "a CPU, 2 cores, 24 GiB, no GPU", "# python 3.11.7, Linux\ntorch==2.13.0\n"
NOW = Origin(commit="c1", is_clean=True, changed_at=1.5e9, packages=PACKAGES)


def file_of(folder: Path, *overrides: str) -> ExperimentFile:
    return load(MLP, [*INPROCESS, f"tracking.directory={folder}", *overrides])


def recorded(
    folder: Path,
    number: int,
    *overrides: str,
    status: Status | None = "FINISHED",
    packages: str = PACKAGES,
    sessions: int = 1,
    time: float = 1e9,
    **tags: str,
) -> Path:
    """A run of mlp.yaml; None: it is running."""
    file = file_of(folder, *overrides)
    place = folder / f"2026110{number}-120000-{file.experiment.name}-{number:04}"
    place.mkdir(parents=True)
    (place / "environment.txt").write_text(packages)
    known = {"role": "main", "git_commit": "c1", "git_dirty": "false", "hardware": HARDWARE, **tags}
    with closing(Journal(place / FILE_NAME)) as journal:
        for _ in range(sessions):
            journal.append(
                RunOpened(time=time, run=place.name, tracking_uri="u", tracking_experiment="e", tags=known,
                          params=flatten(file.experiment), trials=("main",))
            )  # fmt: skip
        if status:
            journal.append(RunClosed(status=status))
    return place


def find(folder: Path, origin: Origin = NOW, *, turn: str = "") -> Same:
    return find_same(file_of(folder), origin, hardware=HARDWARE, turn=turn, seeds=(3, 4, 5))


def test_a_run_counts_if_nothing_of_it_differs(tmp_path: Path) -> None:
    older = recorded(tmp_path, 1, "seed=3")
    newer = recorded(tmp_path, 2, "seed=3", "tracking.log_model=false", "parallel.cpus_per_worker=1")
    recorded(tmp_path, 3, "seed=9")
    recorded(tmp_path, 4, "seed=4", "optimizer.lr=0.3")
    recorded(tmp_path, 5, "seed=4", "model.hidden=[3]")
    recorded(tmp_path, 6, "seed=4", quick="true")
    found = find(tmp_path)
    assert (dict(found.complete), dict(found.stopped), found.others) == ({3: newer}, {}, 0)
    assert older != newer


@pytest.mark.parametrize(
    "other", [{"git_commit": "c2"}, {"git_dirty": "true"}, {"packages": "torch==2.0\n"}, {"hardware": "4 cores"}]
)
def test_a_run_of_other_code_packages_or_hardware_does_not(tmp_path: Path, other: dict[str, str]) -> None:
    recorded(tmp_path, 1, "seed=3", **other)  # type: ignore[arg-type]
    assert find(tmp_path) == Same({}, {}, 1)


@pytest.mark.parametrize("is_clean", [True, False])
def test_changes_that_are_in_no_commit_are_known_by_their_time(tmp_path: Path, is_clean: bool) -> None:
    """A repository is not clean once there are runs that it does not ignore."""
    recorded(tmp_path, 1, "seed=3", git_dirty="true", time=1e9)
    recorded(tmp_path, 2, "seed=4", git_dirty="true", time=2e9)
    assert [*find(tmp_path, NOW._replace(is_clean=is_clean)).complete] == [4]


def test_the_time_of_a_change_is_that_of_the_newest_python_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("model.py", "pkg/data.py", ".venv/lib.py", "notes.txt")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1000 + number, 1000 + number))
    monkeypatch.setattr("pipeline.record.provenance.list_packages", lambda: "p")
    monkeypatch.setattr("pipeline.record.provenance.git", lambda *_: "")
    assert Origin.now() == Origin("", is_clean=False, changed_at=1001, packages="p")


def test_a_stopped_run_is_continued_and_a_running_one_is_waited_for(tmp_path: Path) -> None:
    stopped = recorded(tmp_path, 1, "seed=3", status="KILLED")
    recorded(tmp_path, 2, "seed=4", status="FAILED")
    assert find(tmp_path) == Same({}, {3: stopped}, 0)
    running = recorded(tmp_path, 3, "seed=5", status=None)
    with closing(Journal(running / FILE_NAME)), pytest.raises(UsageError, match="is running, and trains what is to be"):
        find(tmp_path)


def test_a_run_with_a_damaged_line_is_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = recorded(tmp_path, 1, "seed=3") / FILE_NAME
    events.write_bytes(events.read_bytes().replace(b"\n", b"\n{damaged\n", 1))
    assert find(tmp_path) == find(tmp_path) == Same({}, {}, 0)
    assert capsys.readouterr().err.count(f"warning: not used: {events}:2: this line is damaged") == 1


def test_only_trainings_in_turn_have_times(tmp_path: Path) -> None:
    recorded(tmp_path, 1, "seed=3")
    own = recorded(tmp_path, 2, "seed=4", trained_in_turn="key")
    recorded(tmp_path, 3, "seed=5", trained_in_turn="key", sessions=2)  # it was interrupted
    assert find(tmp_path, turn="key") == Same({4: own}, {}, 2)


def comparison(*overrides: str, question: Question = Question(), vary: str = "optimizer.lr=0.1,0.2", pairs: int = 3,  # noqa: B008
               concurrent: int = 1) -> Comparison:  # fmt: skip
    variants = read_variants([MLP], [*INPROCESS, "seed=5", *overrides], vary=vary)
    return plan_comparison(variants, question, pairs=pairs, concurrent=concurrent)


def test_what_is_missing_is_trained_in_turn(tmp_path: Path) -> None:
    plan = comparison()
    nothing = [Same({}, {}, 0)] * 2
    assert [one.title for one in plan.list_missing(nothing)][:4] == ["A, seed 5", "B, seed 5", "B, seed 6", "A, seed 6"]
    some = [Same({5: tmp_path, 6: tmp_path}, {7: tmp_path}, 0), Same({5: tmp_path}, {}, 0)]
    assert [(one.title, one.stopped) for one in plan.list_missing(some)] == [
        ("B, seed 6", None), ("A, seed 7", tmp_path), ("B, seed 7", None),
    ]  # fmt: skip
    timed = plan._replace(question=Question(is_timed=True))
    assert [one.title for one in timed.list_missing(some)][:2] == ["B, seed 6", "A, seed 6"]  # both again
    assert plan.key != comparison(vary="optimizer.lr=0.1,0.3").key
    assert plan.key == comparison(pairs=5).key


def test_trainings_at_the_same_time_share_the_cores() -> None:
    two = comparison(concurrent=2)
    assert {one.cores for one in two.variants} == {max(1, two.variants[0].plan.resources.cpus // 2)}
    with pytest.raises(ResourceError, match=r"--concurrent 99: .* Use at most"):
        comparison(concurrent=99)


def test_what_can_not_be_compared_is_refused() -> None:
    with pytest.raises(UsageError, match="the variants have the same settings"):
        comparison(vary="seed=1,2")
    with pytest.raises(UsageError, match=r"--metric acuracy: .* did you mean accuracy"):
        comparison(question=Question(metric="acuracy"))
    with pytest.raises(ExperimentError, match=r"loss\._target_"):
        comparison(vary="optimizer.lr=0.1,0.2 loss._target_=torch.nn.Nothing")


def test_an_answer_from_fewer_pairs_is_a_look(tmp_path: Path) -> None:
    plan = comparison(f"tracking.directory={tmp_path}")
    known = {"kind": "compare", "name": "n", "title": "", "headline": (), "verdict": "Inconclusive"}
    five, three = (Result(**known, facts=(Fact(key="pairs", value=pairs),)) for pairs in (5, 3))  # type: ignore[arg-type]
    assert compare._find_look(five, plan) is None
    record.save(three, recorded(tmp_path, 1, role="compare", comparison="of others"))
    assert compare._find_look(five, plan) is None
    record.save(three, recorded(tmp_path, 2, role="compare", comparison=plan.key))
    assert (compare._find_look(five, plan) or "").startswith(
        "Extended after a look: 3 pairs said before: Inconclusive."
    )
    assert compare._find_look(three, plan) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lab.yaml", "latest"], "latest is neither an experiment file nor an override"),
        (["nothing.yaml", "lab.yaml"], "nothing.yaml: there is no such file"),
        (["latest", "--seeds", "3"], "--seeds trains experiment files. No file is named, only: latest"),
        (["latest", "--dry-run"], "--dry-run trains experiment files"),
        (["lab.yaml", "--vary", "train.epochs=1,2", "--seeds", "1"], "--seeds 1: a single pair has no"),
        (["lab.yaml", "--vary", "train.epochs=1,2", "--target", "high"], "--target high: write a value of"),
        (["lab.yaml", "--vary", "train.epochs=1,2", "--target", "1", "--concurrent", "2"],
         "trainings run one at a time"),
        (["lab.yaml", "--vary", "train.epochs=1,2", "--dry-run", "--json"], "--dry-run prints the plan"),
        (["lab.yaml", "--vary", "parallel.workers=[1,2],1 parallel.strategy=ddp parallel.launcher=torchrun"],
         "A comparison needs one number"),
    ],
)  # fmt: skip
def test_bad_wishes(command, words: list[str], message: str) -> None:  # type: ignore[no-untyped-def]
    ended = command("compare", *words)
    assert (ended.code, ended.stdout) == (2, ""), ended.output
    assert message in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.output
