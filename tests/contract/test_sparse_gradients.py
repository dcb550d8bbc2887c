"""Embeddings with sparse gradients on two ranks: as on one, with momentum, clipping, accumulation, and resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from ranks import on_ranks
from torch import Tensor, nn

from pipeline.errors import ExperimentError
from pipeline.protocol.trial import Rank
from pipeline.training import loop
from pipeline.training.build import build
from pipeline.training.loop import train

HERE = "test_sparse_gradients"
CASES: dict[str, dict[str, Any]] = {
    "momentum, clipping": {"momentum": 0.9, "train": {"clip_grad_norm": 0.01}},
    "accumulation, skip": {"train": {"gradient_accumulation": 2, "on_nonfinite": "skip"}},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "static_graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "fsdp": ("fsdp", {}, "sparse gradients, which fsdp does not support"),
    "powersgd": ("ddp", {"communication_hook": "powersgd"}, "communication_hook: powersgd"),
    "fp16": ("ddp", {"communication_hook": "fp16"}, "communication_hook: fp16"),
}


class Mixed(nn.Module):
    """A sparse embedding and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 3, sparse=True)
        self.last = nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.words(inputs.abs().mul(2).long().clamp(max=5)).sum(1))
        return outputs


def trial(*, strategy: str, options: dict[str, Any] | None = None, folder: str = "", **more: Any) -> Any:
    given = toys.trial(
        model={"_target_": f"{HERE}.Mixed"},
        optimizer={"_target_": "torch.optim.SGD", "lr": 0.05, "momentum": more.pop("momentum", 0.0)},
        checkpoint={"every_steps": 1, "keep": 100},
        **more,
    )
    update = {"strategy": strategy, "options": options or {}, "checkpoints": folder}
    return given.model_copy(update={**update, "allowed": (*given.allowed, HERE)})


def _train(rank: Rank, folder: Path) -> None:
    loop.probe = lambda *_, **__: toys_parts()  # type: ignore[assignment]
    for name, more in CASES.items():
        for kind, options in OPTIONS.items():
            outbox = toys.Kept()
            train(trial(strategy="ddp", options=options, **more), rank=rank, outbox=outbox)
            if rank.is_first:
                torch.save(outbox.files["model/weights.pt"], folder / f"{name}, {kind}")
    for name, (strategy, options, said) in REFUSED.items():
        with pytest.raises(ExperimentError) as refused:
            build(trial(strategy=strategy, options=options), rank=rank)
        assert said in str(refused.value), name


def toys_parts() -> Any:
    import samples

    return samples.parts(step_ms=5.0)


def test_two_ranks_train_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_ranks(_train, tmp_path, folder=tmp_path, timeout_s=15)

    monkeypatch.setattr(loop, "probe", lambda *_, **__: toys_parts())
    for name, more in CASES.items():
        outbox = toys.Kept()
        train(trial(strategy="single", **more), rank=Rank(), outbox=outbox)
        for kind in OPTIONS:
            reached = torch.load(tmp_path / f"{name}, {kind}")
            for key, expected in outbox.files["model/weights.pt"].items():
                assert torch.allclose(expected, reached[key], rtol=0, atol=1e-12), (name, kind, key)
