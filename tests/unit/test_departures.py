"""A node that is about to go away: who reacts, how, and what is told of it."""

# promise: a node that is about to go away is left in time, at a common step, not counted as a failure

import itertools
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import toys
from samples import finished, spread

from pipeline.drive import elastic
from pipeline.drive.execute import execute
from pipeline.errors import ResourceError, Terminated, TrainingError
from pipeline.experiment.load import ExperimentFile
from pipeline.launch import inprocess
from pipeline.launch.base import Session
from pipeline.launch.cluster import draining, placement
from pipeline.launch.cluster.draining import Departure
from pipeline.protocol.events import (
    AnyEvent,
    CheckpointSaved,
    Failed,
    FirstStep,
    Heartbeat,
    Phase,
    Started,
    TrialOpened,
    Warned,
)
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Trial
from pipeline.protocol.trial_outcome import Outcome
from pipeline.record import journal
from pipeline.record.recorder import Recorder

SPOT = Departure(node="b", label="b (10.0.0.2)", seconds=29.6, has_driver=False)
NOTICE = "b (10.0.0.2) is being drained and ends in 30 s"
SAVING = f"{NOTICE}. Saving a checkpoint to continue on other nodes."
WITHOUT_B = "Not used: b (10.0.0.2). This does not count as a failure."


def started(*nodes: str) -> Started:
    devices = tuple(f"{node} cpu, 1 thread" for node in nodes)
    counts = dict.fromkeys(
        ("steps_per_epoch", "epochs", "train_samples", "epoch_samples", "validation_samples", "parameters"), 1
    )
    return Started(time=0.0, total_steps=1000, devices=devices, data_name="", data_digest="", **counts)


def heartbeat(rank: int, *, node: str) -> Heartbeat:
    where = Rank(rank=rank, world_size=2, node=node)
    return Heartbeat(time=0.0, rank=where, pid=1, process_started=0, step=0, phase=Phase.BUILDING, idle_s=0)


def saved(step: int) -> CheckpointSaved:
    return CheckpointSaved(time=0.0, step=step, path="", megabytes=1.0, seconds=0.0, blocked_seconds=0.0)


class Launcher(inprocess.Launcher):
    """Workers on the nodes a and b at first; they end when they are asked to, or are lost."""

    def __init__(self, session: Session, *, departures: dict[str, Departure], room: int, fate: str) -> None:
        super().__init__(session)
        self.looks = 0
        self._room, self._fate = room, fate
        self._all = departures
        self.departures = self._departures

    def _departures(self) -> dict[str, Departure]:
        self.looks += 1
        return self._all

    def capacity(self, trial: Trial) -> int:
        return self._room

    def launch(self, trial: Trial) -> Outcome:
        attempt = self.attempt(trial)
        if trial.resume:  # type: ignore[attr-defined]
            attempt.receive(started("a"))
            self._await(lambda: self.looks > 3)  # the notice stays
            attempt.receive(finished("main", spread(190)))
            return attempt.outcome()
        beats = (heartbeat(rank, node=node) for rank, node in enumerate("ab"))
        receive = attempt.receive_sent
        for event in (*beats, started("a", "b"), FirstStep(time=0.0), saved(20)):
            receive(event)
        self._await(lambda: self.resize.asked or self.stop.asked or self.looks > 3)
        if self._fate == "fails":
            attempt.receive(Failed(time=1.0, rank=Rank(rank=1, world_size=2), error="ValueError: mine", traceback=""))
        elif self._fate == "ends" and not self.resize.asked and not self.stop.asked:
            attempt.receive(finished("main", spread(190)))
        elif self._fate == "ends":
            attempt.receive(saved(25))
        return attempt.outcome({1: "its process was killed"} if self._fate == "is lost" else {})

    @staticmethod
    def _await(holds: Any) -> None:
        assert any(holds() or time.sleep(0.005) for _ in range(4000))


class Run(NamedTuple):
    launches: int
    warnings: list[str]


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "_SETTLED_S", 0.0)
    monkeypatch.setattr(elastic, "_POLL_S", 0.005)


def carried_out(
    folder: Path, *departures: Departure, workers: Any = 2, room: int = 2, fate: str = "ends", saves: bool = True
) -> Run:
    trial = toys.trial(parallel={"workers": workers, "start_timeout_s": 0.1})
    trial = trial.model_copy(update={"workers": 2, "checkpoints": str(folder) if saves else ""})
    file = SimpleNamespace(explain=lambda problems: AssertionError(problems))
    with closing(Recorder(folder, subscribers=[])) as recorder:
        session = Session(folder=folder, receive=recorder.receive, parallel=trial.experiment.parallel)
        nodes = dict(zip(itertools.count(), departures, strict=False))
        launcher = Launcher(session, departures=cast(dict[str, Departure], nodes), room=room, fate=fate)
        try:
            execute(trial, launcher=launcher, recorder=recorder, file=cast(ExperimentFile, file))
        finally:
            events = list(journal.read(folder / journal.FILE_NAME))
    return seen(events)


def seen(events: list[AnyEvent]) -> Run:
    opened = [event for event in events if isinstance(event, TrialOpened)]
    return Run(len(opened), [event.message for event in events if isinstance(event, Warned)])


def test_the_workers_save_in_time_and_continue_elsewhere(tmp_path: Path) -> None:
    """Once: the notice stays until the node is gone, and both may have the same host name."""
    assert carried_out(tmp_path, SPOT) == Run(2, [SAVING, f"Resuming with 2 of 2 workers from step 25. {WITHOUT_B}"])


def test_an_elastic_training_continues_with_fewer(tmp_path: Path) -> None:
    run = carried_out(tmp_path, SPOT, workers=[1, 2], room=1)
    assert run.warnings[-1] == (f"Resuming with 1 of 2 workers from step 25. {WITHOUT_B}")


def test_without_room_for_the_workers_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"at least 2 workers with 1 core each are required, .* room for 1 "):
        carried_out(tmp_path, SPOT, room=1)


def test_a_node_that_goes_before_the_checkpoint_is_no_failure_either(tmp_path: Path) -> None:
    run = carried_out(tmp_path, SPOT, fate="is lost")
    assert run.warnings[1] == (
        "rank 1 on b exited without reporting an error: its process was killed. "
        f"There was no time left for a checkpoint. Resuming with 2 of 2 workers from step 20. {WITHOUT_B}"
    )


def test_an_error_meanwhile_is_that_of_the_training(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="rank 1 on localhost: ValueError: mine"):
        carried_out(tmp_path, SPOT, fate="fails")


def test_several_nodes_are_told_together(tmp_path: Path) -> None:
    other = Departure(node="a", label="a (10.0.0.1)", seconds=None, has_driver=False)
    run = carried_out(tmp_path, other, SPOT)
    assert run.warnings[0] == f"a (10.0.0.1) is being drained, {SAVING}"
    assert "Not used: a (10.0.0.1), b (10.0.0.2)." in run.warnings[1]


def test_a_node_without_workers_is_no_matter(tmp_path: Path) -> None:
    assert carried_out(tmp_path, SPOT._replace(node="c")) == Run(1, [])


def test_without_checkpoints_the_training_stays(tmp_path: Path) -> None:
    assert carried_out(tmp_path, SPOT, saves=False) == Run(
        1, [f"{NOTICE}. Training continues until then, because there is no checkpoint to resume from."]
    )


def test_the_node_of_the_command_ends_the_run_after_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(Terminated):
        carried_out(tmp_path, SPOT._replace(node="c", has_driver=True))
    run = seen(list(journal.read(tmp_path / journal.FILE_NAME)))
    assert run == Run(1, [f"{NOTICE}. This command runs on that node, so it saves a checkpoint and ends."])


def test_rays_draining_nodes_are_departures_and_get_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {"NodeID": name, "Alive": name != "d", "NodeManagerHostname": name, "NodeManagerAddress": "10.0.0.2"}
        for name in "abcd"
    ]
    monkeypatch.setattr(draining.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(draining.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "c"))
    monkeypatch.setattr(draining.time, "time", lambda: 1000.0)
    for module in (draining, placement):
        monkeypatch.setattr(module, "draining_nodes", lambda: {"b": 1_029_600, "c": 0})
    found = {
        id_: one._replace(seconds=one.seconds and round(one.seconds, 3)) for id_, one in draining.departures().items()
    }
    assert found == {
        "b": SPOT,
        "c": Departure(node="c", label="c (10.0.0.2)", seconds=None, has_driver=True),
    }
    assert [node["NodeID"] for node in placement.usable_nodes()] == ["a"]
