"""torch.compile with several processes: each strategy trains what it trains without. Compiling takes its time."""

# promise: torch.compile, EMA

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import on_ranks

from pipeline.config.load import load
from pipeline.config.targets import allowed_packages
from pipeline.protocol.events import AnyEvent, Event, Failed, Finished, Metrics, event_from_json, event_to_json
from pipeline.protocol.trial import Rank, Training
from pipeline.training import probe
from pipeline.worker import main

pytestmark = pytest.mark.timeout(900)

MODEL = "model={_target_: pipeline.models.MLP, in_features: 4, hidden: [16, 16, 16], num_classes: 3}"
COMPILED, RECOMPUTED = "train.compile=true", "train.activation_checkpointing=true"
TRAININGS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "plain": ("ddp", {}, []),
    "ddp": ("ddp", {}, [COMPILED]),
    "recomputed": ("ddp", {}, [COMPILED, RECOMPUTED]),
    "several buckets, accumulation": (
        "ddp",
        {"bucket_cap_mb": 1},
        [COMPILED, "train.gradient_accumulation=2"],
    ),
    "powersgd": ("ddp", {"communication_hook": "powersgd"}, []),
    "powersgd, compiled": ("ddp", {"communication_hook": "powersgd"}, [COMPILED]),
    "fsdp": ("fsdp", {"groups": "Linear"}, [COMPILED]),
    "fsdp, recomputed": ("fsdp", {"groups": "Linear"}, [COMPILED, RECOMPUTED]),
}


@pytest.fixture(scope="module")
def root(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        patch.syspath_prepend(project)
        folder = tmp_path_factory.mktemp("compiled")
        on_ranks(_in_two_processes, folder, folder=folder)
        yield folder


def _in_two_processes(where: Rank, folder: Path) -> None:
    # Where a step's time goes is measured behind each training; once is enough here.
    probe.SLOT_SECONDS, probe.ROUNDS, probe.FEWEST_ROUNDS = 0.0, 1, 1
    for name, (strategy, options, overrides) in TRAININGS.items():
        experiment = load("lab.yaml", ["train.precision=fp64", MODEL, *overrides]).experiment
        trial = Training(
            name=name, experiment=experiment, strategy=strategy, options=options, launcher="inprocess",
            workers=2, devices_per_worker=0, device="cpu", cpus_per_worker=1, allowed=allowed_packages(),
        )  # fmt: skip
        main.run(trial, rank=where, outbox=_Written(folder / f"{name}.{where.rank}.jsonl"))


class _Written:
    stop_asked = False

    def __init__(self, path: Path) -> None:
        self._path = path

    def event(self, event: AnyEvent) -> None:
        assert not isinstance(event, Failed), event.traceback or event.error
        with self._path.open("ab") as file:
            file.write(event_to_json(event) + b"\n")

    def file(self, path: Path, name: str) -> None: ...


def events(root: Path, name: str, kind: type[Event]) -> list[Any]:
    lines = (root / f"{name}.0.jsonl").read_text().splitlines()
    return [event for event in map(event_from_json, lines) if isinstance(event, kind)]


def losses(root: Path, name: str, metric: str = "train/loss") -> list[float]:
    return [point.value for event in events(root, name, Metrics) for point in event.points if point.name == metric]


@pytest.mark.parametrize("name", [name for name in TRAININGS if "powersgd" not in name and name != "plain"])
def test_losses_are_those_without(root: Path, name: str) -> None:
    for metric in ("train/loss", "validation/loss"):
        assert losses(root, name, metric) == pytest.approx(losses(root, "plain", metric), abs=1e-12)
    (end,) = events(root, name, Finished)
    assert end.result.compile_s > 0


def test_compiling_ahead_leaves_powersgds_memory_alone(root: Path) -> None:
    """It begins after as many steps. What it sends then depends on the order of gradients, which a compiler changes."""
    plain, own, compiled = (losses(root, name) for name in ("plain", "powersgd", "powersgd, compiled"))
    whole = 1 + 3  # a loss shows what the step before has done
    assert own[:whole] == pytest.approx(plain[:whole], abs=1e-12)
    assert compiled[:whole] == pytest.approx(plain[:whole], abs=1e-12)
    assert own[whole] != pytest.approx(plain[whole], abs=1e-6)
    assert compiled[whole] != pytest.approx(plain[whole], abs=1e-6)
