"""Numbers of workers of an elastic training, and what is told of them."""

# promise: `workers: [1, 4]` trains with as many workers as fit at each start, and the same in a resumed run

from collections.abc import Callable

import pytest
import toys
from outer import outer_torchrun

from pipeline.drive import execute
from pipeline.drive.execute import describe_sizes, fit
from pipeline.errors import ExperimentError, ResourceError
from pipeline.experiment.load import flatten, load, to_yaml
from pipeline.experiment.schema import Parallel
from pipeline.launch import inprocess, torchrun
from pipeline.launch.base import Session
from pipeline.plan.plan import DataSizes, describe, make_plan
from pipeline.plan.resources import Resources
from pipeline.protocol.events import AnyEvent, Started
from pipeline.protocol.trial import Trial

FILE = """\
name: lab
model: {_target_: lab.Net}
data: {_target_: lab.points}
loss: {_target_: torch.nn.CrossEntropyLoss}
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
train: {epochs: 2, global_batch_size: 16}
parallel:
  strategy: ddp
  launcher: torchrun
  workers: %s
"""


@pytest.fixture
def written(tmp_path, monkeypatch) -> Callable[..., object]:
    monkeypatch.chdir(tmp_path)

    def write(workers: str, *overrides: str):
        (tmp_path / "e.yaml").write_text(FILE % workers)
        return load("e.yaml", overrides).experiment

    return write


@pytest.mark.parametrize(
    ("text", "least", "most", "parameter"), [("3", 3, 3, "3"), ("[1, 4]", 1, 4, "[1, 4]"), ("[2, 2]", 2, 2, "2")]
)
def test_one_number_or_two(written, tmp_path, text, least, most, parameter) -> None:
    experiment = written(text)
    parallel = experiment.parallel
    assert (parallel.least_workers, parallel.workers, parallel.is_elastic) == (least, most, least < most)
    assert written("1", f"parallel.workers={text.replace(' ', '')}") == experiment
    assert flatten(experiment)["parallel.workers"] == parameter
    (tmp_path / "again.yaml").write_text(to_yaml(experiment))
    assert load("again.yaml").experiment == experiment
    assert type(experiment).model_validate_json(experiment.model_dump_json()) == experiment
    measurement = toys.trial(max_steps=2, parallel={"workers": [least, most]})
    assert (trial(least, most).is_elastic, measurement.is_elastic) == (least < most, False)


NUMBERS = "write an integer greater than 0, or [minimum, maximum]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[4, 1]", "is a list; write the smaller number first: [1, 4]"),
        ("[0, 2]", f"is a list; {NUMBERS}, instead of [0, 2]"),
        ("[1, 2, 3]", f"is a list; {NUMBERS}, instead of [1, 2, 3]"),
        ("[1, 2.0]", f"is a list; {NUMBERS}, instead of [1, 2.0]"),
        ("two", f"is 'two' (a string); {NUMBERS}"),
        ("0", f"is 0 (an integer); {NUMBERS}"),
    ],
)
def test_what_is_no_number_of_workers(written, text, message) -> None:
    with pytest.raises(ExperimentError) as error:
        written(text)
    assert f"e.yaml:10: parallel.workers: {message}" in str(error.value).splitlines()


def test_the_json_schema_shows_both() -> None:
    schema = Parallel.model_json_schema()["properties"]["workers"]
    assert [choice["type"] for choice in schema["anyOf"]] == ["integer", "array"]
    assert schema["default"] == 1


def test_another_size_needs_checkpoints(written) -> None:
    with pytest.raises(ExperimentError, match=r"parallel.workers: is \[1, 4\], but checkpoint.keep is 0"):
        written("[1, 4]", "checkpoint.keep=0")


@pytest.mark.parametrize(("cpus", "now", "each"), [(1, 1, 1), (2, 2, 1), (8, 4, 2)])
def test_the_plan_says_how_many_there_is_room_for_now(written, cpus, now, each) -> None:
    plan = make_plan(written("[1, 4]"), Resources(cpus=cpus, memory_mb=4096))
    assert (plan.main.workers, plan.main.cpus_per_worker) == (now, each)
    shown = describe(plan, DataSizes(50, 50, 4))
    assert f"  workers: {now}\n" in shown
    assert f"  elastic: 1 to 4 workers\n  threads_per_worker: {each}\n" in shown
    assert any(f"Room for {now} of 4 workers is free" in note for note in plan.notes) == (now < 4)
    assert [trial.cpus_per_worker for trial in plan.measured if trial.role == "reference"] == [now * each] * (now > 1)
    with pytest.raises(ResourceError, match=r"parallel\.workers: 5 workers with 1 core each need 5 cores"):
        make_plan(written("[5, 9]"), Resources(cpus=min(cpus, 4), memory_mb=4096))


class Roomy(inprocess.Launcher):
    """A launcher with room as told, call after call; the last answer stays."""

    def __init__(self, *room: int) -> None:
        super().__init__(Session(folder=None, receive=lambda _: None, parallel=Parallel()))
        self.rooms = list(room)

    def capacity(self, trial: Trial) -> int:
        return self.rooms.pop(0) if len(self.rooms) > 1 else self.rooms[0]


def trial(least: int, most: int, **parallel: object) -> Trial:
    return toys.trial(parallel={"workers": [least, most], **parallel})


def test_room_on_this_machine(monkeypatch) -> None:
    there = Resources(cpus=8, memory_mb=4096, gpus=("H200", "H200"))
    monkeypatch.setattr("pipeline.plan.resources.detect", lambda: there)
    session = Session(folder=None, receive=lambda _: None, parallel=Parallel())
    wanted = trial(1, 4).model_copy(update={"cpus_per_worker": 3})
    assert torchrun.Launcher(session).capacity(wanted) == 2
    on_gpus = {"device": "cuda", "devices_per_worker": 1, "cpus_per_worker": 1}
    assert torchrun.Launcher(session).capacity(wanted.model_copy(update=on_gpus)) == 2
    assert inprocess.Launcher(session).capacity(wanted) == 1
    for name, value in outer_torchrun(world_size=3).items():
        monkeypatch.setenv(name, value)
    assert torchrun.Launcher(session).capacity(wanted) == 3


@pytest.mark.parametrize(
    ("room", "workers"),
    [((9,), 4), ((2,), 2), ((0, 1, 3), 3), ((1, 2, 3, 4), 4), ((0,), 1)],
    ids=["most", "some", "grows", "late", "none: the launcher waits for the least"],
)
def test_as_many_as_fit_once_that_is_settled(room, workers, monkeypatch) -> None:
    monkeypatch.setattr(execute, "_SETTLED_S", 0.3)
    assert fit(trial(1, 4), launcher=Roomy(*room)).workers == workers


def started(*nodes: str) -> Started:
    devices = tuple(f"{node} cpu, 1 thread" for node in nodes)
    counts = dict.fromkeys(
        ("steps_per_epoch", "epochs", "train_samples", "epoch_samples", "validation_samples", "parameters"), 1
    )
    return Started(time=0.0, total_steps=1000, devices=devices, data_name="", data_digest="", **counts)


def test_the_course_of_a_training_is_told() -> None:
    events: list[AnyEvent] = [started("a"), started("a", "b"), started("a", "b")]
    assert list(describe_sizes(events, trial="main")) == [
        "The number of workers changed: 1, then 2. Throughput and speedup are for the last 2 workers."
    ]
    assert list(describe_sizes(events[1:], trial="main")) == []
