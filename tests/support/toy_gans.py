"""A tiny pair of networks that train against each other, and tasks that several optimizers can't be trained by."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from pipeline.tasks import Loss, gathered

Update = Callable[[str, Tensor], None]


class Pair(nn.Module):
    def __init__(self, noise: int = 3) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(noise, 4), nn.Tanh(), nn.Linear(4, 1))
        self.critic = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))

    def forward(self, noise: Tensor) -> Tensor:
        outputs: Tensor = self.generator(noise)
        return outputs


class Duel:
    """The noise comes with the batch: `toys.regression`'s inputs; ``fails`` is what goes wrong."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.scale = nn.Parameter(torch.ones(()))

    def __call__(self, model: Any, batch: Any, update: Update) -> Loss | None:
        noise, real = batch
        made = model.generator(noise)
        if model.training:
            model.count += torch.tensor([1, len(noise)])
        critic = softplus(model.critic(made.detach())).mean() + softplus(-model.critic(real)).mean()
        scored = {"score": model.critic(made).mean()}
        logs = scored if self.fails != "taken" else {"loss_critic": critic}
        found = Loss(outputs=made, targets=real, logs=logs)
        update("other" if self.fails == "name" else "critic", critic * self.scale)
        if self.fails == "missing":
            return found
        loss = softplus(-model.critic(made)).mean()
        if self.fails == "detached":
            loss = loss.detach()
        if self.fails == "independent":
            loss = model.critic(real).mean()
        update("generator", loss[None] if self.fails == "list" else loss)
        if self.fails == "nothing later":
            self.calls = getattr(self, "calls", 0) + 1
            return found if self.calls == 1 else None
        return found

    def pictures(self, model: Any) -> dict[str, Tensor]:
        if self.fails == "pictures":
            raise LookupError("no such picture")
        noise = torch.randn(5, 3, dtype=next(model.parameters()).dtype)
        return {"made up": model.generator(noise).sigmoid().view(5, 1, 1, 1).expand(5, 1, 4, 3)}


class Compared(Duel):
    """Generated rows compared with those of all ranks, which a rank without a sample that counts leaves out."""

    def __call__(self, model: Any, batch: Any, update: Update) -> Loss:
        noise, real = batch
        made = model.generator(noise)
        critic = softplus(model.critic(made.detach())).mean() + softplus(-model.critic(real)).mean()
        update("critic", critic * self.scale)
        counted, others = real > 0, gathered(made)
        loss = softplus(-model.critic(made)).mean()
        if counted.any():
            loss = loss + torch.where(counted, (made - others.mean(0)).square(), 0).mean()
        update("generator", loss)
        return Loss(outputs=made, targets=real)


ADAM = {"_target_": "torch.optim.Adam", "lr": 0.02}
SECTIONS: dict[str, Any] = {
    "model": {"_target_": "toy_gans.Pair"},
    "loss": None,
    "task": {"_target_": "toy_gans.Duel"},
    "optimizer": None,
    "optimizers": {
        "critic": {**ADAM, "params": ["critic.*", "task.scale"]},
        "generator": {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9, "params": "generator.*"},
    },
    "schedulers": {"generator": {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 2, "gamma": 0.5}},
}


def every(steps: int, **more: Any) -> dict[str, Any]:
    """Return the section optimizers with a generator that is updated in some steps only."""
    optimizers: dict[str, Any] = SECTIONS["optimizers"]
    return optimizers | {"generator": {**optimizers["generator"], "every": steps, **more}}


STOPPED = 4  # Step within the second epoch of three, after which a training is resumed
CASES: dict[str, dict[str, Any]] = {
    "clipped": SECTIONS | {"train": {"clip_grad_norm": 0.05}},
    "compared": SECTIONS | {"task": {"_target_": "toy_gans.Compared"}},
    "every second step": SECTIONS | {"optimizers": every(2, clip_grad_norm=0.1)},
}
