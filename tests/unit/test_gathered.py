"""Losses over the whole global batch: refused where there is none, and components that use them."""

from typing import Any

import pytest
import samples
import torch
import toy_contrastive
import toys
from torch import nn
from torch.nn import functional

from pipeline.data import digits, two_views
from pipeline.errors import ExperimentError
from pipeline.models import MLP, SimCLR
from pipeline.protocol.trial import CellMeasurement, Rank
from pipeline.tasks import gathered
from pipeline.tasks.contrastive import Contrastive, nt_xent
from pipeline.tasks.gathering import GlobalBatch, Pass
from pipeline.tasks.linear_probe import LinearProbe
from pipeline.training import loop
from pipeline.training.loop import train


def trained(task: str, *, measures_costs: bool = False, **sections: Any) -> None:
    trial = toys.trial(**toy_contrastive.case(task), **sections)
    own = {"measures_costs": True} if measures_costs else {}
    train(trial.model_copy(update=own), rank=Rank(), outbox=toys.Kept())


def test_outside_of_a_training_the_batch_is_the_global_batch() -> None:
    rows = torch.rand(3, 2)
    assert gathered(rows) is rows


@pytest.mark.parametrize(
    ("task", "sections", "message"),
    [
        ("Similar", {"train": {"gradient_accumulation": 2}}, r"gradient_accumulation: is 2, but the task compares all"),
        (
            "ByView",
            {},
            r"task: called pipeline\.tasks\.gathered with .* shape \(16, 4\)\. It needs 8 rows, one for each",
        ),
        ("InEvaluation", {}, r"task: calls pipeline\.tasks\.gathered in evaluation only"),
    ],
)
def test_what_has_no_global_batch_is_refused(task: str, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        trained(task, **sections)


def test_what_is_not_gathered_is_told_before_the_first_step() -> None:
    with pytest.raises(ExperimentError, match=r"task: is not the mean over the samples .* pipeline\.tasks\.gathered"):
        trained("AgainstOwn", train={"gradient_accumulation": 2})
    trained("AgainstOwn")
    with pytest.raises(ExperimentError, match=r"\. Return the loss of all rows without StepOutput\.weight\."):
        trained("WeighsAll", train={"gradient_accumulation": 2})


def test_a_prediction_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "probe", lambda context, **_: samples.parts(step_ms=5.0))
    with pytest.raises(ExperimentError, match=r"task: calls pipeline\.tasks\.gathered, .* Remove --predict"):
        trained("Similar", kind=CellMeasurement, max_steps=2, measures_costs=True)


def test_without_communication_own_rows_stand_in_for_those_of_the_others() -> None:
    rows = torch.rand(3, 2, requires_grad=True)
    with Pass(lambda: GlobalBatch(1, 3, (3, 3), torch.arange(6), communicates=False)):
        found = gathered(rows)
    found.sum().backward()
    assert torch.equal(found, torch.cat([rows, rows]))
    assert torch.equal(rows.grad, torch.ones(3, 2))


def test_nt_xent_is_the_mean_over_both_directions() -> None:
    first, second = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0)).unbind()
    rows = functional.normalize(torch.cat([first, second]), dim=1)
    terms = []
    for index in range(8):
        others = [rows[index] @ rows[other] / 0.2 for other in range(8) if other != index]
        terms.append(torch.stack(others).logsumexp(0) - rows[index] @ rows[(index + 4) % 8] / 0.2)
    assert torch.allclose(nt_xent(first, second, temperature=0.2), torch.stack(terms).mean())


def test_contrastive_takes_two_views_and_shows_the_features_of_the_first() -> None:
    train_set, _ = two_views(digits())
    first, second, targets = torch.utils.data.default_collate([train_set[index] for index in range(6)])
    model = SimCLR(MLP(64, hidden=[8], num_classes=5), features=5, projection=3)
    output = Contrastive()(model, (first, second, targets))
    assert first.shape == second.shape == (6, 1, 8, 8)
    assert not torch.equal(first, second)
    assert torch.allclose(output.outputs, model.encoder(first))
    assert output.loss.requires_grad
    with pytest.raises(ExperimentError, match=r"task\.temperature: is 0; write a number above 0"):
        Contrastive(temperature=0)
    with pytest.raises(ExperimentError, match=r"data\.of: is a Linear; name a data function"):
        two_views(nn.Linear(1, 1))


def test_the_probe_predicts_each_sample_by_the_others() -> None:
    generator = torch.Generator().manual_seed(1)
    targets = torch.arange(40) % 3
    features = torch.randn(40, 4, generator=generator) + 1.5 * functional.one_hot(targets, 4)
    probe = LinearProbe(num_classes=3, penalty=0.5)
    for part in range(0, 40, 16):
        probe.update(features[part : part + 16], targets[part : part + 16])
    scaled = ((features - features.mean(0)) / features.std(0)).double()
    inputs = torch.cat([scaled, torch.ones(40, 1)], dim=1)
    penalties = torch.tensor([0.5] * 4 + [1e-9]).double().diag()
    right = 0
    for left_out in range(40):
        rest = torch.arange(40) != left_out
        known, wanted = inputs[rest], functional.one_hot(targets[rest], 3).double()
        weights = torch.linalg.solve(known.T @ known + penalties, known.T @ wanted)
        right += int((inputs[left_out] @ weights).argmax() == targets[left_out])
    assert float(probe.compute()) == pytest.approx(right / 40)
    assert 0.5 < right / 40 < 1
