"""The trained model on its way to MLflow: exported by rank 0, sent without torch, the same as MLflow's own."""

# promise: each rank of srun has a GPU that it sees; an export fits into a container

import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import mlflow.pytorch
import pytest
import torch
import toys
import yaml
from mlflow.models import Model
from recordings import Store
from toy_runs import InFolder

from pipeline.protocol.events import EXAMPLE, REFERENCE, WEIGHTS, ModelExported, ModelSaved, RunClosed, RunOpened
from pipeline.protocol.trial import Rank
from pipeline.record import journal as journals
from pipeline.system import MemoryLimit
from pipeline.tracking.follow import sync
from pipeline.train import exported, report
from pipeline.train.reference import ModelCall, record
from pipeline.train.run import train


@pytest.fixture
def trained(lab: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, InFolder]:
    """The folder of a run that has exported its model, and what rank 0 has said."""
    monkeypatch.chdir(lab)
    (lab / "pyproject.toml").write_text('[tool.pipeline]\npackages = ["toys"]\n')
    folder = lab / "runs" / "made"
    folder.mkdir(parents=True)
    trial = toys.trial().model_copy(update={"exports": True})
    (folder / "experiment.yaml").write_text(yaml.safe_dump(trial.experiment.model_dump(mode="json", by_alias=True)))
    outbox = InFolder(folder)
    train(trial, rank=Rank(), outbox=outbox)
    return folder, outbox


def the(outbox: toys.Kept, kind: Any) -> Any:
    return next(event for event in outbox.events if isinstance(event, kind))


def journaled(folder: Path, store: Store, events: list[Any]) -> None:
    """Write the journal of a run with these events."""
    tags = {"strategy": "single", "world_size": "1"}
    opened = RunOpened(time=1.7e9, run="made", tracking_uri=store.uri, tracking_experiment="made", tags=tags, params={},
                       trials=("main",))  # fmt: skip
    with closing(journals.Journal(folder / journals.FILE_NAME)) as journal:
        for event in (opened, *events, RunClosed(time=1.7e9 + 9, status="FINISHED")):
            journal.append(event)


class Named(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = (x * mask * self.scale).sum(1, keepdim=True).expand(-1, 4)
        return {"logits": logits, "loss": logits.mean()}


class Branching(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum().item() > 0 else -x)


class OfTwo(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([super(OfTwo, self).forward(x[place]) for place in range(len(x))])


def written(lab: Path, model: type[torch.nn.Module], *, warn: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """MLflow's folder of a model, written from what a run has left."""
    folder = lab / "run"
    (folder / "model").mkdir(parents=True)
    module = model().eval()
    inputs = {"x": torch.ones(2, 4), "mask": torch.ones(2, 4)} if model is Named else torch.ones(2, 4)
    torch.save(module.state_dict(), folder / WEIGHTS)
    torch.save(inputs, folder / EXAMPLE)
    call = ModelCall.of(inputs)
    record(module, call, device=torch.device("cpu"), is_exact=True, runtime={}).save(folder / REFERENCE)
    monkeypatch.setattr(exported, "seeded_model", lambda *_: model())
    exported.write_mlflow_model(toys.trial().experiment, folder / "mlflow", folder=folder, allowed=(), warn=warn)
    return folder / "mlflow"


@pytest.mark.filterwarnings("ignore")  # as in a run
def test_named_inputs_are_a_program_with_a_signature_of_tensors(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any length, in the order of the signature; also where the outputs have a single number, as a loss."""
    path = written(lab, Named, warn=pytest.fail, monkeypatch=monkeypatch)
    described = Model.load(path).signature
    assert [(one.name, one.shape) for one in described.inputs] == [("x", (-1, -1)), ("mask", (-1, -1))]
    assert [(one.name, one.shape) for one in described.outputs] == [("logits", (-1, 4)), ("loss", ())]
    loaded = mlflow.pytorch.load_model(str(path))
    assert loaded(torch.ones(5, 7), torch.ones(5, 7))["logits"].shape == (5, 4)


@pytest.mark.filterwarnings("ignore")  # as in a run
@pytest.mark.parametrize("model", [Branching, OfTwo])
def test_a_model_that_cannot_be_exported_for_any_batch_is_a_pickle(
    lab: Path, model: type[torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    path = written(lab, model, warn=told.append, monkeypatch=monkeypatch)
    assert "logged as pickle, because torch.export failed" in told[0]
    assert mlflow.pytorch.load_model(str(path))(torch.ones(5, 4)).shape == (5, 4)


EXPORT_NOTHING = """
import sys
from pathlib import Path
from pipeline.train.exported import write_mlflow_model

try:
    write_mlflow_model(None, Path("there"), folder=Path("missing"), allowed=(), warn=print)
except FileNotFoundError:
    print(*(name for name in ("mlflow.pytorch", "pytorch_lightning") if name in sys.modules))
"""


def test_an_export_does_not_import_lightning_for_the_autologging_of_mlflow() -> None:
    """It takes longer than all the rest of an export."""
    pytest.importorskip("pytorch_lightning")
    done = subprocess.run([sys.executable, "-c", EXPORT_NOTHING], capture_output=True, text=True, check=True)
    assert done.stdout == "mlflow.pytorch\n"


def test_the_program_is_sent_without_torch_and_then_removed(
    trained: tuple[Path, InFolder], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, outbox = trained
    journaled(folder, store, outbox.events)
    program = folder / the(outbox, ModelExported).program
    assert program.exists()
    with monkeypatch.context() as patch:
        patch.setattr(exported, "write_mlflow_model", lambda *_, **__: pytest.fail("the model was built again"))
        assert sync(folder, warn=pytest.fail).delivered
    assert not program.exists()

    (run,) = store.runs("made")
    (output,) = run.outputs.model_outputs
    model = store.client.get_logged_model(output.model_id)
    assert (model.status, model.name) == ("READY", "model")
    assert "Exported by torch.export" in model.tags["mlflow.note.content"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.uri)
    loaded = mlflow.pytorch.load_model(model.model_uri)
    inputs = torch.load(folder / "model" / "example.pt")
    linear = torch.nn.Linear(3, 1).double()
    linear.load_state_dict(torch.load(folder / "model" / "weights.pt"))
    assert torch.allclose(loaded(inputs), linear(inputs))

    before = store.contents("made")
    assert sync(folder, warn=pytest.fail).delivered
    assert store.contents("made") == before


@pytest.mark.filterwarnings("ignore")  # as in a run
def test_a_model_for_which_a_container_has_too_little_memory_is_sent_later(
    trained: tuple[Path, InFolder], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the kernel would end all its processes at the last step: neither rank 0 nor the writer tries."""
    folder, outbox = trained
    journaled(folder, store, [the(outbox, ModelSaved)])
    least = 3 * (folder / WEIGHTS).stat().st_size
    trial, again, warnings = toys.trial().model_copy(update={"exports": True}), InFolder(folder), list[str]()
    with monkeypatch.context() as patch:
        patch.setattr(exported, "find_memory_limits", lambda: [MemoryLimit(2**32, free=least - 1)])
        report.exported_model(trial, again, folder=folder)
        assert sync(folder, warn=warnings.append).delivered
    assert again.events == []
    (warning,) = warnings
    assert warning.startswith("the model isn't logged to MLflow. Exporting it takes ")
    assert " of the limit of 4.3 GB are free. Its weights are in the run's folder. Run pipeline sync where" in warning

    assert sync(folder, warn=pytest.fail).delivered
    assert store.runs("made")[0].outputs.model_outputs
