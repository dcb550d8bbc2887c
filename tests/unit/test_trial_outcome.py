"""Outcomes of launches: results, and the rank whose error is shown."""

import threading
from pathlib import Path

import pytest
import toys
from samples import finished, spread

from pipeline.errors import ExperimentError, PipelineError, Problem, TrainingError
from pipeline.launch import inprocess
from pipeline.launch.base import Session
from pipeline.protocol.events import AnyEvent, Failed, Finished, FirstStep, Origin, Outcome, Started, Trained, Warned
from pipeline.protocol.trial import Rank

BY_PEER = "RuntimeError: [pair.cc:547] Connection closed by peer [127.0.0.1]:51423"
OWN = "ConnectionResetError: [Errno 104] Connection reset by peer"
KILLED = "killed by SIGKILL (out of memory?)"


def failed(
    rank: int, error: str, *, origin: Origin = "rank", world_size: int = 2, problems: tuple[Problem, ...] = ()
) -> Failed:
    where = Rank(rank=rank, world_size=world_size, node=f"node-{rank}")
    traceback = "" if problems else f"traceback of rank {rank}"
    return Failed(time=0.0, rank=where, error=error, traceback=traceback, problems=problems, origin=origin)


def lost(rank: int) -> Failed:
    return failed(rank, BY_PEER, origin="lost_peer")


def started(*nodes: str) -> Started:
    counts = dict.fromkeys(
        ("total_steps", "steps_per_epoch", "epochs", "train_samples", "epoch_samples", "validation_samples"), 1
    )
    devices = tuple(f"{node} cpu, 1 thread" for node in nodes)
    return Started(time=0.0, devices=devices, data_name="", data_digest="", parameters=1, **counts)


MINE = "ValueError: mine"
CODES = {0: "ended with exit code 1", 1: "ended with exit code 1"}
OF_1 = f"rank 1 on node-1: {MINE}"
SILENT = "exited without reporting an error"
WRONG = (Problem("model", "wrong"),)


@pytest.mark.parametrize(
    ("failures", "losses", "nodes", "kind", "said"),
    [
        ([failed(1, MINE), failed(0, "KeyError: later")], {}, "", TrainingError, OF_1),
        ([lost(0), failed(1, MINE)], {}, "", TrainingError, OF_1),
        ([failed(0, "", origin="peer_timeout"), failed(1, MINE)], CODES, "", TrainingError, OF_1),
        ([lost(0)], {1: KILLED}, "", TrainingError, f"rank 1 {SILENT}: {KILLED}"),
        ([failed(0, MINE)], {0: "ended with exit code 1", 1: KILLED}, "", TrainingError, f"rank 0 on node-0: {MINE}"),
        ([], {0: KILLED, 3: "gone"}, "", TrainingError, f"rank 0 {SILENT}: {KILLED}; rank 3 {SILENT}: gone"),
        ([], {0: KILLED, 2: KILLED}, "", TrainingError, f"rank 0, rank 2 {SILENT}: {KILLED}"),
        ([], {1: KILLED}, "ab", TrainingError, f"rank 1 on b {SILENT}: {KILLED}"),
        ([], {1: KILLED}, "aa", TrainingError, f"rank 1 {SILENT}: {KILLED}"),
        ([lost(1), lost(0)], {}, "", TrainingError, f"rank 1 on node-1: {BY_PEER}"),
        ([], {}, "", TrainingError, "the workers ended without a result; their logs are in the run's folder"),
        ([failed(0, MINE, world_size=1)], {}, "", TrainingError, MINE),
        ([failed(1, "model: wrong", problems=WRONG)], CODES, "", ExperimentError, "model: wrong"),
    ],
)  # fmt: skip
def test_the_first_that_failed_by_itself_is_to_blame_else_who_ended_without_a_word(
    failures: list[Failed], losses: dict[int, str], nodes: str, kind: type[PipelineError], said: str
) -> None:
    error = Outcome(failures=tuple(failures), losses=losses, nodes=dict(enumerate(nodes))).error
    assert (type(error), str(error)) == (kind, said)


def test_a_rank_that_lost_a_connection_of_its_own_is_no_lost_worker() -> None:
    assert Outcome(failures=(lost(0),), losses=CODES).has_only_lost_workers
    assert not Outcome(failures=(lost(0), failed(1, OWN)), losses=CODES).has_only_lost_workers


def launcher_of(folder: Path, received: list[AnyEvent]) -> inprocess.Launcher:
    parallel = toys.trial().experiment.parallel
    return inprocess.Launcher(Session(folder=folder, receive=received.append, parallel=parallel))


def test_an_outcome_is_what_the_events_say() -> None:
    end = finished("main", spread(1.0))
    trained = Trained(time=0.0, result=end.result)
    outcome = Outcome()
    for event in (started("a"), Warned(time=0.0, message="careful"), lost(1), failed(0, OWN), trained, end):
        outcome = outcome.after(event)
    assert outcome == Outcome(started=started("a"), trained=trained, finished=end, failures=(lost(1), failed(0, OWN)))
    assert outcome.has_ended
    assert outcome.has_failed
    assert not Outcome(started=started("a"), trained=trained).has_ended


def test_the_time_to_the_first_step_is_the_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("pipeline.launch.base.time.monotonic", lambda: now)
    received: list[AnyEvent] = []
    trial = toys.trial()
    launcher = launcher_of(tmp_path, received)
    first, second = launcher.attempt(trial), launcher.attempt(trial)
    now = 107.5
    first.receive(FirstStep(time=0.0))
    now = 110.0
    for attempt in (first, second):  # the second one never took a step
        attempt.receive(finished("main", spread(1.0)))

    ends = [event for event in received if isinstance(event, Finished)]
    assert [end.time_to_first_step_s for end in ends] == [7.5, None]
    assert [first.outcome().finished, second.outcome().finished] == ends


def test_events_of_what_a_training_is_compared_with_wait_for_its_end(tmp_path: Path) -> None:
    received: list[AnyEvent] = []
    trial = toys.trial()
    baseline = toys.trial(max_steps=2).model_copy(update={"name": "baseline"})
    launcher = launcher_of(tmp_path, received)
    attempt = launcher.attempt(trial.model_copy(update={"compared_with": (baseline,)}))
    own, other = finished("main", spread(190)), finished("baseline", spread(100))
    beside = [started("a").model_copy(update={"trial": "baseline"}), other]
    for event in (beside[0], other, own):
        attempt.receive(event)

    assert [event.trial for event in received] == ["main"]
    assert list(attempt.outcome().beside) == beside
    assert attempt.outcome().finished is received[0]
    alone = launcher.attempt(trial)
    alone.receive(other)
    assert alone.outcome().beside == ()


def test_failures_from_any_thread_are_kept(tmp_path: Path) -> None:
    attempt = launcher_of(tmp_path, []).attempt(toys.trial())
    threads = [threading.Thread(target=attempt.receive, args=(failed(rank, OWN),)) for rank in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {failure.rank.rank for failure in attempt.outcome().failures} == set(range(16))
