"""Trial steps of ``pipeline check`` on a few samples: they accept what runs, and find what fails."""

# promise: `check` finds what `run` finds, accepts what runs; a crash is an error

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import toys
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipeline.drive import preflight
from pipeline.errors import PipelineError
from pipeline.experiment.load import from_mapping
from pipeline.plan import resources
from pipeline.plan.resources import Resources
from pipeline.protocol.events import AnyEvent, Started
from pipeline.system import MemoryLimit
from pipeline.tasks import Loss

OWN = f"{__name__}."


class UnusedPart(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 1)
        self.unused = nn.Linear(2, 2)


class ByName:
    """A task whose batches are mappings."""

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        outputs = model(batch["inputs"])
        loss = nn.functional.mse_loss(outputs, batch["targets"], reduction="sum")
        return Loss(loss, None, outputs, batch["targets"])


def names() -> tuple[Any, None]:
    return toys.Plain([{"inputs": torch.ones(3), "targets": torch.ones(1)}] * 8), None


def wrong_test_set() -> tuple[TensorDataset, ...]:
    train, validation = toys.regression()
    return train, validation, TensorDataset(torch.ones(4, 7), torch.ones(4, 1))  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def _one_core(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(resources, "detect", lambda: Resources(cpus=1, memory_mb=4096))
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


def tried(**sections: Any) -> list[AnyEvent]:
    known = toys.experiment().model_dump(by_alias=True, include={"name", "seed", "model", "data", "loss", "optimizer"})
    values = {**known, "train": {"epochs": 2, "global_batch_size": 8}, **sections}
    events: list[AnyEvent] = []
    file = from_mapping({name: value for name, value in values.items() if value is not None})
    preflight.try_steps(file, allowed=toys.ALLOWED, receive=events.append)
    return events


def component(name: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": name, **arguments}


STREAM = {"data": component("toy_streams.stream", kind="Plain", validation=True)}
CRITICS = {
    "generator": component("torch.optim.SGD", lr=0.1, params=["generator.*"]),
    "critic": component("torch.optim.SGD", lr=0.1, params=["critic.*", "task.scale"]),
}
WITHOUT_LOSS: dict[str, Any] = {"loss": None}
RIGHT: dict[str, dict[str, Any]] = {
    "regression": {},
    "a test set": {"data": component("toys.with_test")},
    "an iterable dataset": STREAM | {"train": {"steps": 3, "global_batch_size": 8}},
    "a mapping": WITHOUT_LOSS | {"data": component(OWN + "names"), "task": component(OWN + "ByName")},
    "a schedule of one step": {
        "scheduler": component("torch.optim.lr_scheduler.OneCycleLR", max_lr=0.1, total_steps="${total_steps}"),
        "train": {"steps": 1, "global_batch_size": 8},
    },
    "a loss that is not finite": {"optimizer": component("torch.optim.SGD", lr=1e30)},
    "more workers than cores": {"parallel": {"strategy": "ddp", "launcher": "torchrun", "workers": 8}},
    "a GPU": {"parallel": {"strategy": "ddp", "device": "cuda", "launcher": "torchrun", "workers": 2}},
    "an option for GPUs": {
        "parallel": {"strategy": "ddp", "launcher": "torchrun", "options": {"communication_hook": "bf16"}}
    },
    "several optimizers": WITHOUT_LOSS | {
        "model": component("toy_gans.Pair"), "task": component("toy_gans.Duel"), "optimizer": None,
        "optimizers": CRITICS,
    },
    "samples that are compared": WITHOUT_LOSS | {
        "model": component("torch.nn.Linear", in_features=3, out_features=2),
        "data": component("toy_contrastive.pairs"), "task": component("toy_contrastive.Similar"),
    },
    "a LightningModule": WITHOUT_LOSS | {
        "model": None, "optimizer": None, "data": component("toys.classification"),
        "task": component("pipeline.tasks.Lightning", module=component("lit.Lit")),
    },
}  # fmt: skip
TWO_CLASSES = component("torch.nn.Linear", in_features=3, out_features=2)
CROSS_ENTROPY = component("torch.nn.CrossEntropyLoss")
ACCURACY = component("torchmetrics.classification.MulticlassAccuracy", num_classes=3)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "shapes": ({"model": component("torch.nn.Linear", in_features=4, out_features=1)}, "shapes cannot be multiplied"),
    "classes": (
        {"model": TWO_CLASSES, "data": component("toys.classification"), "loss": CROSS_ENTROPY},
        "loss: gets outputs of shape .* 2 classes are numbered 0 to 1",
    ),
    "an argument": ({"optimizer": component("torch.optim.SGD", lr="abc")}, "torch.optim.SGD raised TypeError"),
    "a metric": ({"metrics": {"accuracy": ACCURACY}}, "metrics.accuracy: MulticlassAccuracy raised"),
    "the test set": ({"data": component(OWN + "wrong_test_set")}, "shapes cannot be multiplied"),
    "a sample": ({"data": component("toys.unreadable", index=0)}, "no such image"),
    "parameters without a gradient": (
        {"model": component(OWN + "UnusedPart"), "parallel": {"strategy": "ddp", "launcher": "inprocess"}},
        "find_unused_parameters: is false, but unused.weight",
    ),
    "the baseline": ({"benchmark": {"baseline": {"strategy": "ddp", "workers": 2}}}, "baseline.workers: is 2, but"),
}  # fmt: skip


@pytest.mark.parametrize("sections", RIGHT.values(), ids=RIGHT.keys())
def test_what_can_be_trained_is_accepted(sections: dict[str, Any]) -> None:
    events = tried(**sections)

    assert [event.kind for event in events if isinstance(event, Started)]
    assert not any(event.kind in ("metrics", "finished", "model_saved", "failed") for event in events[-1:])


@pytest.mark.parametrize(("sections", "said"), WRONG.values(), ids=WRONG.keys())
def test_what_fails_is_found(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(PipelineError, match=said):
        tried(**sections)


@pytest.mark.parametrize(
    ("sections", "free", "said"),
    [
        ({}, 2**30, ""),
        ({"model": component("torch.nn.Linear", in_features=3, out_features=2**20)}, 2**27, "take 0.1 GiB, and 0.1"),
        ({"parallel": {"launcher": "ray", "address": "10.0.0.1:6379"}}, 2**30, "on the Ray cluster at 10.0.0.1:6379"),
    ],
)  # fmt: skip
def test_what_is_not_tried_is_said(
    monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], free: int, said: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(preflight, "find_memory_limits", lambda: [MemoryLimit(free, free)])
    experiment = toys.experiment(**sections)

    reason = preflight.find_reason_to_skip(experiment, allowed=toys.ALLOWED)

    assert (said in reason) if said else not reason
