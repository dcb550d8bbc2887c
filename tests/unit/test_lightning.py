"""A LightningModule as it is: what it logs and returns, what is refused by the name of the hook, and where."""

# promise: a LightningModule: its logs, what is refused by name; as with Lightning's Trainer, 1 to 4 workers, resumed

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")
import lit
import torch
import toys
from lit import TASK, trained, trial

from pipeline.errors import ExperimentError
from pipeline.protocol.trial import Rank
from pipeline.tasks import Lightning
from pipeline.train.run import train


def test_logs_are_reported_under_their_names_in_training_and_evaluation() -> None:
    kept = trained()
    losses = kept.series("train/loss")
    assert len(losses) == 6
    assert kept.series("train/train_loss") == losses
    assert kept.series("train/place") == [0, 1, 2, 103, 104, 105]  # global_step, and 100 times current_epoch
    assert kept.series("validation/val_loss") == kept.series("validation/loss")
    assert len(kept.series("validation/val_f1")) == 2
    rates = kept.series("train/learning_rate")  # configure_optimizers knew the six steps of the training
    assert rates == pytest.approx([0.05 * (1 + math.cos(math.pi * step / 6)) for step in range(6)])


def test_an_interval_of_the_module_that_the_file_doesnt_follow_is_refused() -> None:
    with pytest.raises(ExperimentError, match=r"train.scheduler_interval: is step, but configure_optimizers .*epoch"):
        trained(arguments={"interval": "epoch"})
    kept = trained(arguments={"interval": "epoch"}, train={"scheduler_interval": "epoch"})
    rates = kept.series("train/learning_rate")
    assert rates[0] == rates[2] == 0.1 > rates[3] == rates[5]


def test_a_scheduler_of_the_module_follows_the_log_that_the_file_names() -> None:
    train_ = {"scheduler_interval": "epoch", "epochs": 3}
    with pytest.raises(ExperimentError, match=r"monitors val_f1, .*; set train.scheduler_metric: validation/val_f1"):
        trained("PlateauLit", train=train_)
    with pytest.raises(ExperimentError, match=r"scheduler.mode: is max, but ReduceLROnPlateau follows validation/loss"):
        trained("PlateauLit", train={**train_, "scheduler_metric": "validation/loss"})
    kept = trained("PlateauLit", train={**train_, "scheduler_metric": "validation/val_f1"})
    assert kept.series("train/learning_rate")[::3] == pytest.approx([0.1, 0.1, 0.01])


def test_a_log_can_be_followed_if_the_file_says_which_direction_is_better(tmp_path: Path) -> None:
    best = {"best": "validation/val_f1", "mode": "max", "keep": 100}
    outbox = toys.Kept()
    result = train(trial(checkpoint=best, checkpoints=tmp_path), rank=Rank(), outbox=outbox).best
    highest = max(outbox.points("validation/val_f1"), key=lambda point: point.value)
    assert result is not None
    assert result.step == highest.step == 3  # the first of two epochs
    with pytest.raises(ExperimentError, match=r"checkpoint.best: validation/f2 is not reported; .* validation/val_f1"):
        trained(checkpoint={**best, "best": "validation/f2"})


def test_several_optimizers_and_a_step_without_loss_are_refused() -> None:
    several = r"SeveralLit.configure_optimizers returned 2 optimizers.* use optimizers:"
    with pytest.raises(ExperimentError, match=several):
        trained("SeveralLit")
    silent = r"SilentLit.validation_step returned NoneType as its loss; return a tensor"
    with pytest.raises(ExperimentError, match=silent):
        trained("SilentLit")


def test_the_module_is_left_as_it_was() -> None:
    module = lit.Lit().train()
    before = set(vars(module))
    assert Lightning()(module, toys.classification()[0][:]).sum.requires_grad
    assert set(vars(module)) == before
    assert module._trainer is None


def test_a_mean_over_other_items_comes_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    mean = torch.tensor(0.5)
    for count, total in ((7, 3.5), (torch.tensor(0), 0)):
        returned = {"loss": mean if total else mean / 0, "count": count}
        monkeypatch.setattr(lit.Lit, "training_step", lambda *_, returned=returned: returned)
        loss = Lightning()(lit.Lit().train(), [torch.ones(2)])
        assert (loss.sum, loss.count) == (total, count)


Checked = Callable[..., Any]


@pytest.fixture
def checked(command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checked:
    """A command about a file with a module."""

    def call(verb: str, *options: str, module: str = "Lit", more: str = "") -> Any:
        file = tmp_path / "lit.yaml"
        file.write_text(
            "name: lit\n"
            "data: {_target_: toys.classification}\n"
            f"task: {{_target_: {TASK}, module: {{_target_: lit.{module}}}}}\n"
            "train: {epochs: 1, global_batch_size: 8}\n"
            f"{more}\n"
        )
        (tmp_path / "pyproject.toml").write_text('[tool.pipeline]\npackages = ["lit", "toys"]\n')
        monkeypatch.chdir(tmp_path)
        return command(verb, str(file), *options)

    return call


@pytest.mark.parametrize(
    ("module", "more", "message"),
    [
        ("HookedLit", "", r"lit.yaml:3: task.module._target_: HookedLit.on_train_epoch_end isn't supported"),
        ("ManualLit", "", r"ManualLit.automatic_optimization is False. Manual optimization isn't supported"),
        ("PlainLit", "", r"optimizer: missing. Set it, or add configure_optimizers to PlainLit"),
        ("Lit", "optimizer: {_target_: torch.optim.SGD, lr: 0.1}",
         r"lit.yaml:5: optimizer: Lit.configure_optimizers also"),
        ("Lit", "scheduler: {_target_: torch.optim.lr_scheduler.StepLR, step_size: 1}",
         r"lit.yaml:5: scheduler: needs"),
        ("Lit", "model: {_target_: torch.nn.Linear, in_features: 3, out_features: 3}", r"model: model and task"),
        ("Lit", "benchmark: {baseline: {strategy: dp}}",
         r"benchmark.baseline.strategy: dp copies the module to each GPU"),
        ("Lit", "checkpoint: {best: validation/val_f1}",
         r"best: validation/val_f1 is logged by .*checkpoint.mode to max"),
        ("Lit, width: 3", "", r"lit.yaml:3: task.module.width: lit.Lit has no such argument"),
    ],
)  # fmt: skip
def test_what_isnt_supported_is_refused_when_the_file_is_checked(
    checked: Checked, module: str, more: str, message: str
) -> None:
    ended = checked("check", module=module, more=more)
    assert ended.code == 2
    assert re.search(message, ended.stderr), ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_plan_names_the_module(checked: Checked) -> None:
    ended = checked("run", "task.module.lr=0.2", "--dry-run")
    assert "model: lit.Lit\noptimizers:\n- the one that the module defines\n" in ended.stdout, ended.output
