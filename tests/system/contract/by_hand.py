"""Trainings, each as an experiment and as a loop by hand in plain torch over whole global batches, with torch's means.

The loop by hand shares nothing with the project but the order of the samples and the seeds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.utils.data import Dataset

from pipeline.experiment.schema import Experiment
from pipeline.experiment.targets import BUILT_IN
from pipeline.protocol.trial import Training
from pipeline.tasks import Loss, gathered
from pipeline.train.order import SampleOrder, mix, mixer, seed_all

CLASSES, TOKENS, DECAY, CLIP, SEED = 4, 11, 0.8, 0.3, 5
WEIGHTS = [1.0, 5.0, 2.0, 0.5]


class Data(Dataset[Any]):
    """Samples of a kind, in fp64; with ``augmented`` inputs get noise each time that they are read."""

    def __init__(self, kind: str, samples: int, *, seed: int, augmented: bool = False) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.augmented = augmented
        self.inputs = torch.randn(samples, 8, generator=draw, dtype=torch.float64)
        self.targets = torch.randint(0, CLASSES, (samples,), generator=draw)
        if kind == "ignored":
            self.targets[torch.rand(samples, generator=draw) < 0.4] = 3
        elif kind == "values":
            self.targets = torch.randn(samples, CLASSES, generator=draw, dtype=torch.float64)
        elif kind == "probabilities":
            self.targets = torch.rand(samples, CLASSES, generator=draw, dtype=torch.float64).softmax(1)
        elif kind == "masks":
            self.inputs = torch.randn(samples, 8, 5, generator=draw, dtype=torch.float64)
            self.targets = torch.randint(0, CLASSES, (samples, 5), generator=draw)
            self.targets[torch.rand(samples, 5, generator=draw) < 0.5] = 255
        elif kind == "boxes":
            there = torch.randint(6, (samples, 1), generator=draw) * (torch.arange(samples)[:, None] % 3 == 0)
            boxes = torch.randn(samples, 5, generator=draw, dtype=torch.float64)
            self.targets = boxes.masked_fill(torch.arange(5) >= there, float("inf"))
        elif kind in ("tokens", "few tokens"):
            self.inputs, self.targets = torch.randint(0, TOKENS, (2, samples, 6), generator=draw)
            self.targets[torch.rand(samples, 6, generator=draw) < 0.5] = -100
            self.targets[: 9 if kind == "tokens" else samples - 5] = -100

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = 0.3 * torch.randn(8, dtype=torch.float64) if self.augmented else 0.0
        return self.inputs[index] + noise if self.augmented else self.inputs[index], self.targets[index]


def data(kind: str, samples: int, augmented: bool = False) -> tuple[Data, Data]:
    return Data(kind, samples, seed=3, augmented=augmented), Data(kind, 23, seed=4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.tanh(self.linear(inputs))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.blocks(inputs))


class Spare(Mlp):
    """A model with a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)


class Segments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, CLASSES, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(TOKENS, 8), Block(), nn.Linear(8, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(tokens)))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(inputs), self.second(inputs)

    def encode(self, inputs: Tensor) -> Tensor:
        return self.first(inputs)


class Duel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.generator = nn.Linear(8, 8)


class Temperature(nn.Module):
    """Cross entropy with a learned temperature, a vector or a scalar, which is also logged."""

    def __init__(self, scalar: bool = False) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full(() if scalar else (1,), 0.7))

    def forward(self, model: nn.Module, batch: Any) -> Loss:
        inputs, targets = batch
        outputs = model(inputs) * self.factor.exp()
        total = F.cross_entropy(outputs, targets, reduction="sum")
        return Loss(total, None, outputs, targets, {"factor": self.factor.sum()})


class Contrast(nn.Module):
    """A loss over all pairs of samples of the global batch, with a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 0.7))

    def forward(self, model: nn.Module, batch: Any) -> Loss:
        first, second = map(gathered, model(batch[0]))
        return Loss(contrast(first, second, self.scale) * len(batch[0]))


def contrast(first: Tensor, second: Tensor, scale: Tensor) -> Tensor:
    logits, same = scale.exp() * first @ second.T, torch.arange(len(first))
    return (F.cross_entropy(logits, same) + F.cross_entropy(logits.T, same)) / 2


class Teacher(nn.Module):
    """Distance from a frozen teacher, which is part of the task."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = Mlp().requires_grad_(False)

    def forward(self, model: nn.Module, batch: Any) -> Loss:
        outputs = model(batch[0])
        distances = (outputs - self.teacher(batch[0])).square().mean(1)
        return Loss(distances.sum(), None, outputs, batch[1])


class Encoded:
    """A task that calls a method of the model, not its forward."""

    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        outputs = model.encode(batch[0])  # type: ignore[operator]
        return Loss(F.cross_entropy(outputs, batch[1], reduction="sum"), None, outputs, batch[1])


class Adversaries:
    """A critic and a generator, updated one after the other."""

    def __call__(self, model: Any, batch: Any, update: Callable[[str, Tensor], None]) -> None:
        inputs, _ = batch
        fake = model.generator(inputs.flip(1))
        update("critic", F.softplus(model.critic(fake.detach())).mean() + F.softplus(-model.critic(inputs)).mean())
        update("generator", F.softplus(-model.critic(fake)).mean())


class MeanTask:
    """A task that returns a plain mean."""

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return F.huber_loss(model(batch[0]), batch[1])


def powers() -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss of one's own, a mean over the samples."""
    return lambda outputs, targets: (outputs - targets).abs().pow(1.5).sum(1).mean()


Mean = Callable[[Any, Any, Any], Tensor]
Logs = Callable[[Any, Any], Mapping[str, Tensor]]
SGD = {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9}
ADAMW = {"_target_": "torch.optim.AdamW", "lr": 0.01}
COSINE = {"_target_": "torch.optim.lr_scheduler.CosineAnnealingLR", "T_max": 8}
EMA = {"ema": {"decay": DECAY}}


@dataclass(kw_only=True)
class Case:
    """An experiment, and the mean loss of a global batch of (model, task, batch) by hand."""

    mean: Mean
    logs: Logs = lambda *_: {}  # Means of (model, batch) that the task reports
    kind: str = "labels"
    samples: int = 50
    train: Mapping[str, Any] = field(default_factory=dict)
    sections: Mapping[str, Any] = field(default_factory=dict)
    model: str = "Mlp"
    augmented: bool = False
    only: tuple[str, ...] = ("single", "ddp", "fsdp")
    options: Mapping[str, Any] = field(default_factory=dict)

    def trial(self, strategy: str) -> Training:
        """Return the training with a strategy."""
        optimizer = {} if "optimizers" in self.sections else {"optimizer": SGD}
        experiment = Experiment.model_validate(
            {
                "name": "by-hand",
                "seed": SEED,
                "model": {"_target_": f"by_hand.{self.model}"},
                "data": {
                    "_target_": "by_hand.data", "kind": self.kind, "samples": self.samples, "augmented": self.augmented,
                },
                **optimizer,
                **self.sections,
                "train": {
                    "epochs": 2, "global_batch_size": 16, "precision": "fp64", "log_every_steps": 1, **self.train,
                },
            }
        )  # fmt: skip
        options = {"groups": ["Block"]} if strategy == "fsdp" and self.model in ("Mlp", "Language") else {}
        return Training(
            name="main", experiment=experiment, strategy=strategy,
            options=self.options if strategy == "ddp" else options,
            launcher="inprocess", workers=1, devices_per_worker=0, device="cpu", cpus_per_worker=1, train_only=True,
            allowed=(*BUILT_IN, "by_hand", "weighed"),
        )  # fmt: skip


def _entropy(**options: Any) -> Mapping[str, Any]:
    return {"loss": {"_target_": "torch.nn.CrossEntropyLoss", **options}}


def _labels(model: Any, _: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _with(**options: Any) -> Mean:
    """Return torch's cross entropy with options; 0 where all targets are ignored."""
    ignored = options.get("ignore_index", -100)
    weight = torch.tensor(options.pop("weight"), dtype=torch.float64) if "weight" in options else None

    def mean(model: Any, _: Any, batch: Any) -> Tensor:
        outputs, targets = model(batch[0]), batch[1]
        if not targets.is_floating_point() and not (targets != ignored).any():
            return outputs.sum() * 0
        if outputs.ndim == 3 and targets.shape == outputs.shape[:2]:
            outputs, targets = outputs.flatten(0, 1), targets.flatten()
        return F.cross_entropy(outputs, targets, weight, **options)

    return mean


def _metrics(**targets: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"metrics": {name: {"_target_": f"torchmetrics.{one.pop('of')}", **one} for name, one in targets.items()}}  # type: ignore[attr-defined]


_GAN = {
    "task": {"_target_": "by_hand.Adversaries"},
    "optimizers": {
        "critic": {**ADAMW, "params": "critic.*", "clip_grad_norm": 0.5},
        "generator": {**ADAMW, "params": "generator.*"},
    },
}
_LANGUAGE = {"task": {"_target_": "pipeline.tasks.LanguageModel"}}
_TEMPERATURE = {"task": {"_target_": "by_hand.Temperature"}}
_MSE = {"loss": {"_target_": "torch.nn.MSELoss"}}


def _mse(model: Any, _: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def _huber(model: Any, _: Any, batch: Any) -> Tensor:
    return F.huber_loss(model(batch[0]), batch[1])


def _distances(model: Any, batch: Any) -> Tensor:
    """Return those of all boxes of a batch."""
    there = batch[1].isfinite()
    distances: Tensor = (model(batch[0])[:, :1].expand_as(batch[1]) - batch[1])[there]
    return distances


def _offsets(model: Any, batch: Any) -> Mapping[str, Tensor]:
    distances = _distances(model, batch)
    return {"offset": distances.mean(), "far": (distances.abs() > 1).double().mean()}


def _scaled(model: Any, task: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]) * task.factor.exp(), batch[1])


CASES: Mapping[str, Case] = {
    "plain": Case(mean=_labels, sections=_entropy()),
    "one sample left": Case(mean=_labels, sections=_entropy(), samples=49),
    "accumulation": Case(mean=_labels, sections=_entropy(), train={"gradient_accumulation": 2}),
    "more micro-batches than samples": Case(
        mean=_labels, sections=_entropy(), samples=49, train={"gradient_accumulation": 5}
    ),
    "clipping": Case(mean=_labels, sections=_entropy(), train={"clip_grad_norm": CLIP}),
    "mean of all elements": Case(mean=_mse, sections=_MSE, kind="values"),
    "own loss": Case(
        mean=lambda model, _, batch: powers()(model(batch[0]), batch[1]),
        sections={"loss": {"_target_": "by_hand.powers"}}, kind="values",
    ),
    "plain mean": Case(
        mean=_huber, sections={"task": {"_target_": "by_hand.MeanTask"}}, kind="values", samples=49,
        train={"gradient_accumulation": 2},
    ),
    "class weights": Case(mean=_with(weight=WEIGHTS), sections=_entropy(weight=WEIGHTS), samples=49),
    "a class of weight 0": Case(
        mean=_with(weight=[1.0, 0.0, 2.0, 0.5]), sections=_entropy(weight=[1.0, 0.0, 2.0, 0.5]), samples=49,
    ),
    "smoothing": Case(
        mean=_with(weight=WEIGHTS, label_smoothing=0.2), sections=_entropy(weight=WEIGHTS, label_smoothing=0.2),
        train={"gradient_accumulation": 2},
    ),
    "weights and ignored labels": Case(
        mean=_with(weight=WEIGHTS, ignore_index=3), sections=_entropy(weight=WEIGHTS, ignore_index=3), kind="ignored",
        samples=49, train={"gradient_accumulation": 3},
    ),
    "class probabilities": Case(
        mean=_with(weight=WEIGHTS), sections=_entropy(weight=WEIGHTS), kind="probabilities"
    ),
    "masks": Case(mean=_with(ignore_index=255), sections=_entropy(ignore_index=255), kind="masks", model="Segments"),
    "tokens": Case(mean=_with(), sections=_LANGUAGE, kind="tokens", samples=49, model="Language"),
    "tokens, with all that changes a step": Case(
        mean=_with(), sections={**_LANGUAGE, "optimizer": ADAMW, "scheduler": COSINE}, kind="tokens", samples=49,
        model="Language", train={"gradient_accumulation": 3, "clip_grad_norm": 0.2, **EMA},
    ),
    "hardly any tokens": Case(mean=_with(), sections=_LANGUAGE, kind="few tokens", samples=49, model="Language"),
    "boxes": Case(
        mean=lambda model, _, batch: _distances(model, batch).square().mean(), logs=_offsets, kind="boxes", samples=64,
        sections={"task": {"_target_": "weighed.Detection"}}, train={"gradient_accumulation": 2},
    ),
    "averages": Case(mean=_labels, sections={**_entropy(), "scheduler": COSINE}, train=EMA),
    "schedule by epoch": Case(
        mean=_labels, train={"scheduler_interval": "epoch"},
        sections={
            **_entropy(), "optimizer": ADAMW,
            "scheduler": {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 1, "gamma": 0.1},
        },
    ),
    "learned temperature": Case(mean=_scaled, sections=_TEMPERATURE, samples=49),
    "learned scalar": Case(
        mean=_scaled, sections={"task": {**_TEMPERATURE["task"], "scalar": True}}, train={"clip_grad_norm": CLIP},
    ),
    "contrastive": Case(
        mean=lambda model, task, batch: contrast(*model(batch[0]), task.scale),
        sections={"task": {"_target_": "by_hand.Contrast"}}, model="Pair",
    ),
    "frozen teacher": Case(
        mean=lambda model, task, batch: F.mse_loss(model(batch[0]), task.teacher(batch[0])),
        sections={"task": {"_target_": "by_hand.Teacher"}}, samples=49,
    ),
    "method of the model": Case(
        mean=lambda model, _, batch: F.cross_entropy(model.encode(batch[0]), batch[1]),
        sections={"task": {"_target_": "by_hand.Encoded"}}, model="Pair", only=("single", "ddp"),
        options={"find_unused_parameters": True},
    ),
    "frozen layers": Case(mean=_labels, sections=_entropy(), train={"freeze": ["blocks.0.*"]}),
    "augmentation": Case(mean=_labels, sections=_entropy(), augmented=True),
    "adversaries": Case(
        mean=lambda *_: torch.zeros(()), sections=_GAN, samples=49, model="Duel", only=("single", "ddp"),
        train={"epochs": None, "steps": 7},
    ),
    "metrics of classes": Case(
        mean=_labels, samples=49, train={"gradient_accumulation": 2},
        sections={
            **_entropy(),
            **_metrics(
                accuracy={"of": "classification.MulticlassAccuracy", "num_classes": CLASSES, "average": "macro"},
                auroc={"of": "classification.MulticlassAUROC", "num_classes": CLASSES},
                f1={"of": "F1Score", "task": "multiclass", "num_classes": CLASSES},
            ),
        },
    ),
    "metrics of values": Case(
        mean=_mse, kind="values",
        sections={
            **_MSE,
            **_metrics(
                rmse={"of": "MeanSquaredError", "squared": False}, r2={"of": "R2Score"},
                pearson={"of": "PearsonCorrCoef", "num_outputs": CLASSES},
            ),
        },
    ),
    "static graph": Case(
        mean=_labels, sections=_entropy(), samples=49, train={"gradient_accumulation": 2}, only=("ddp",),
        options={"static_graph": True},
    ),
    "unused layer": Case(
        mean=_labels, sections=_entropy(), model="Spare", only=("ddp",), options={"find_unused_parameters": True},
    ),
}  # fmt: skip


@dataclass
class Trained:
    """What a training has led to."""

    losses: list[float]
    weights: dict[str, Tensor]  # Weights of the model and, with "task." before them, of the task
    values: dict[str, float]  # Loss, metrics and logs of the validation set at the end, and logs of the last step


def train_by_hand(case: Case) -> Trained:
    """Train a case in a plain loop over whole global batches, and evaluate the whole validation set at once."""
    experiment = case.trial("single").experiment
    train = experiment.train
    dataset, held_out = data(case.kind, case.samples, case.augmented)
    order = SampleOrder(
        samples=len(dataset), set_size=len(dataset), global_batch_size=train.global_batch_size, seed=SEED
    )
    total = train.steps_of(order.steps_per_epoch)
    seed_all(mix(SEED, "model"))
    model = globals()[case.model]()
    seed_all(mix(SEED, "task"))
    task: Any = None
    if experiment.task is not None and experiment.task.target.startswith("by_hand."):
        task = globals()[experiment.task.target.removeprefix("by_hand.")](**experiment.task.arguments)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(name.startswith(one.rstrip("*")) for one in train.freeze))
    of_task = dict(task.named_parameters()) if isinstance(task, nn.Module) else {}
    named = {**dict(model.named_parameters()), **{f"task.{name}": one for name, one in of_task.items()}}
    for one in named.values():
        one.data = one.data.double()
    parameters = [one for one in named.values() if one.requires_grad]

    def batch_of(step: int) -> list[Tensor]:
        seed_of, rows = mixer(SEED, "sample", step // order.steps_per_epoch), []
        for index in order.global_batch(step).tolist():
            seed_all(seed_of(index))
            rows.append(dataset[index])
        return [torch.stack(column) for column in zip(*rows, strict=True)]

    if experiment.optimizers:
        return Trained(_duel_by_hand(model, batch_of, total), _copied(named), {})
    declared = experiment.optimizer
    assert declared is not None
    optimizer = getattr(torch.optim, declared.target.rpartition(".")[2])(parameters, **declared.arguments)
    scheduler: Any = None
    if experiment.scheduler is not None:
        kind = getattr(torch.optim.lr_scheduler, experiment.scheduler.target.rpartition(".")[2])
        scheduler = kind(optimizer, **experiment.scheduler.arguments)
    losses: list[float] = []
    averages: list[Tensor] = []
    logs: Mapping[str, Tensor] = {}
    for step in range(total):
        batch = batch_of(step)
        loss, logs = case.mean(model, task, batch), case.logs(model, batch)
        optimizer.zero_grad()
        loss.backward()
        if train.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(parameters, train.clip_grad_norm)
        optimizer.step()
        if scheduler is not None and (train.scheduler_interval == "step" or not (step + 1) % order.steps_per_epoch):
            scheduler.step()
        now = [one.detach().clone() for one in parameters]
        averages = [a * DECAY + b * (1 - DECAY) for a, b in zip(averages, now, strict=True)] if averages else now
        losses.append(loss.item())
    weights = _copied(named)
    if train.ema is not None:
        for one, average in zip(parameters, averages, strict=True):
            one.data.copy_(average)
    values = {f"train/{name}": value.item() for name, value in logs.items()}
    with torch.no_grad():
        whole = [torch.stack(column) for column in zip(*(held_out[n] for n in range(len(held_out))), strict=True)]
        if case.model != "Pair":  # of a contrastive loss global batches are evaluated, not the whole set
            values["validation/loss"] = float(case.mean(model, task, whole))
        values |= {f"validation/{name}": value.item() for name, value in case.logs(model, whole).items()}
        for name, declared_metric in experiment.metrics.items():
            module, _, kind_name = declared_metric.target.rpartition(".")
            metric = getattr(import_module(module), kind_name)(**declared_metric.arguments)
            assert isinstance(metric, torchmetrics.Metric)
            metric.update(model(whole[0]), whole[1])
            found = metric.compute().flatten().tolist()
            names = [name] if len(found) == 1 else [f"{name}_{index}" for index in range(len(found))]
            values |= {f"validation/{one}": value for one, value in zip(names, found, strict=True)}
    return Trained(losses, weights, values)


def _duel_by_hand(model: Any, batch_of: Callable[[int], list[Tensor]], total: int) -> list[float]:
    critic, generator = (torch.optim.AdamW(part.parameters(), lr=0.01) for part in (model.critic, model.generator))
    losses = []
    for step in range(total):
        inputs, _ = batch_of(step)
        fake = model.generator(inputs.flip(1))
        first = F.softplus(model.critic(fake.detach())).mean() + F.softplus(-model.critic(inputs)).mean()
        model.zero_grad()
        first.backward()
        nn.utils.clip_grad_norm_(model.critic.parameters(), 0.5)
        critic.step()
        second = F.softplus(-model.critic(fake)).mean()
        model.zero_grad()
        second.backward()
        generator.step()
        losses.append((first + second).item())
    return losses


def _copied(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in named.items()}
