"""The trained model on its way to MLflow: exported by rank 0, sent without torch, the same as MLflow's own."""

# promise: each rank of srun has a GPU that it sees; an export fits into a container

from contextlib import closing
from pathlib import Path
from typing import Any

import mlflow.pytorch
import numpy as np
import pytest
import torch
import toys
import yaml
from mlflow.models import Model
from recordings import Store
from toy_runs import InFolder

from pipeline.protocol.events import WEIGHTS, ModelExported, ModelSaved, RunClosed, RunOpened
from pipeline.protocol.rank import Rank
from pipeline.record import journal as journals
from pipeline.system.memory import MemoryLimit
from pipeline.tracking.mlflow.model_folder import Module, Program, signature
from pipeline.tracking.mlflow.sync import sync
from pipeline.train import exported, report
from pipeline.train.run import train

OWN = {"model_id", "model_uuid", "utc_time_created", "model_size_bytes", "artifact_path", "run_id"}
"""Fields that differ between equal models."""


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


@pytest.mark.filterwarnings("ignore")  # as in a run
def test_the_folder_is_what_mlflow_itself_writes(trained: tuple[Path, InFolder], tmp_path: Path) -> None:
    folder, outbox = trained
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    Program.of(the(outbox, ModelExported), folder=folder).write(ours, model=Model(), warn=pytest.fail)
    Module.of(the(outbox, ModelSaved), folder=folder).write(theirs, model=Model(), warn=pytest.fail)

    files = [sorted(str(file.relative_to(path)) for file in path.rglob("*")) for path in (ours, theirs)]
    assert files[0] == files[1]
    for name in ("input_example.json", "serving_input_example.json"):
        assert yaml.safe_load((ours / name).read_text()) == yaml.safe_load((theirs / name).read_text())
    flavors, expected = (
        {key: value for key, value in yaml.safe_load((path / "MLmodel").read_text()).items() if key not in OWN}
        for path in (ours, theirs)
    )
    expected["flavors"]["python_function"].pop("pickle_module_name")  # of a pickle, which this isn't
    assert flavors == expected
    wanted = [set((path / "requirements.txt").read_text().split()) for path in (ours, theirs)]
    assert wanted[0] == wanted[1]
    for name in ("conda.yaml", "python_env.yaml"):
        keys = [yaml.safe_load((path / name).read_text()).keys() for path in (ours, theirs)]
        assert keys[0] == keys[1]
    inputs = np.ones((5, 3))
    predicted = [mlflow.pyfunc.load_model(str(path)).predict(inputs) for path in (ours, theirs)]
    assert np.array_equal(*predicted)


def test_a_mapping_with_a_single_number_has_a_signature_of_tensors() -> None:
    """As the outputs of a model that also computes its loss; MLflow itself infers columns of it."""
    outputs = {"logits": np.zeros((2, 3), np.float32), "loss": np.zeros((), np.float32)}
    described = signature({"x": np.zeros((2, 4)), "mask": np.zeros(2, bool)}, outputs)
    assert [(one.name, one.shape) for one in described.inputs] == [("x", (-1, 4)), ("mask", (-1,))]
    assert [(one.name, one.shape) for one in described.outputs] == [("logits", (-1, 3)), ("loss", ())]


def test_the_program_is_sent_without_torch_and_then_removed(
    trained: tuple[Path, InFolder], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, outbox = trained
    journaled(folder, store, outbox.events)
    program = folder / the(outbox, ModelExported).program
    assert program.exists()
    with monkeypatch.context() as patch:
        patch.setattr(Module, "of", lambda *_, **__: pytest.fail("the model was built again"))
        assert sync(folder, warn=pytest.fail).delivered
    assert not program.exists()

    (run,) = store.runs("made")
    (output,) = run.outputs.model_outputs
    model = store.client.get_logged_model(output.model_id)
    assert (model.status, model.name) == ("READY", "model")
    assert "dtype=torch.float64" in model.tags["mlflow.note.content"]
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
