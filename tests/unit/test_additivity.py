"""A loss that the number of workers or micro-batches would change is found out before the first step."""

# promise: losses weighted by tokens or class weights; other losses are refused

from typing import Any

import pytest
import torch
import toys

from pipeline.config.targets import BUILT_IN
from pipeline.errors import ExperimentError
from pipeline.protocol.events import Warned
from pipeline.protocol.rank import Rank
from pipeline.tasks import Supervised
from pipeline.training.build import build
from pipeline.training.context import TrainContext
from pipeline.training.loop import train

BOXES = {
    "model": {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 2},
    "data": {"_target_": "weighed.boxes"},
    "loss": None,
}


def built(*, accumulation: int = 1, **sections: Any) -> TrainContext:
    train = {"gradient_accumulation": accumulation, **sections.pop("train", {})}
    trial = toys.trial(train=train, **sections)
    return build(trial.model_copy(update={"allowed": (*BUILT_IN, "toys", "weighed")}), rank=Rank())


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_sum_is_refused(accumulation: int) -> None:
    with pytest.raises(ExperimentError, match=r"loss: is a sum over the samples \(.* for 5 .*return the mean"):
        built(loss={"_target_": "weighed.summed"}, accumulation=accumulation)


def test_a_loss_that_compares_samples_is_refused_where_a_step_has_several_micro_batches() -> None:
    with pytest.raises(
        ExperimentError,
        match=r"loss: is not the mean over the samples .* With 2 micro-batches it differs from the loss of",
    ):
        built(loss={"_target_": "weighed.compared"}, accumulation=2)
    built(loss={"_target_": "weighed.compared"})


def test_a_task_that_divides_by_something_else_must_say_so() -> None:
    with pytest.raises(ExperimentError, match=r"task: is not the mean .*Return its divisor as StepOutput\.weight"):
        built(**BOXES, task={"_target_": "weighed.Uncounted"}, accumulation=2)
    assert built(**BOXES, task={"_target_": "weighed.Detection"}, accumulation=2).seen.gives_weight


TAGGER = {"model": {"_target_": "weighed.tagger"}, "loss": None}
POINTS = {"data": {"_target_": "weighed.points"}}
LINE = {"model": {"_target_": "weighed.zero_line"}}


@pytest.mark.parametrize(
    "sections",
    [
        TAGGER | {"data": {"_target_": "weighed.padded_later"}, "task": {"_target_": "weighed.Untold"}},
        {
            "model": {"_target_": "weighed.small_tagger"}, "data": {"_target_": "weighed.tokens"}, "loss": None,
            "task": {"_target_": "weighed.Untold"},
        },
        {
            "model": {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 4}, **POINTS,
            "loss": {"_target_": "weighed.nearly_even"}, "train": {"precision": "bf16"},
        },
        LINE | {"loss": {"_target_": "weighed.of_the_active"}},
        LINE | {"loss": {"_target_": "weighed.rescaled"}},
    ],
    ids=["first samples are full", "equal at the start", "class weights near 1", "active samples", "gradients only"],
)  # fmt: skip
def test_a_mean_over_something_else_is_refused_where_few_samples_do_not_show_it(sections: dict[str, Any]) -> None:
    with pytest.raises(ExperimentError, match="is not the mean over the samples"):
        built(accumulation=2, **sections)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("task", ["weighed.Tagging", "pipeline.tasks.LanguageModel"])
def test_a_weighted_mean_is_taken_where_samples_differ_most(task: str, precision: str) -> None:
    sections = TAGGER | {"data": {"_target_": "weighed.padded_later"}, "train": {"precision": precision}}
    assert built(accumulation=2, task={"_target_": task}, **sections).seen.unexamined == ""


@pytest.mark.parametrize(
    ("task", "what"),
    [
        ("weighed.Sometimes", "for some batches and None for others; return it for all or none"),
        ("weighed.Listed", r"a tensor of shape \(1,\) as StepOutput.weight; it must be a scalar tensor"),
    ],
)
def test_a_weight_that_can_not_be_used_is_refused(task: str, what: str) -> None:
    with pytest.raises(ExperimentError, match=f"task: .*{what}"):
        built(**BOXES, task={"_target_": task})


@pytest.mark.parametrize("loss", ["weighed.per_sample", "weighed.drawn"])
def test_a_mean_is_taken_with_and_without_random_numbers(loss: str) -> None:
    assert built(loss={"_target_": loss}, accumulation=2).seen.unexamined == ""


@pytest.mark.parametrize(("of", "what"), [("summed", "is a sum over the"), ("contrasted", "is not the mean over the")])
def test_a_loss_that_draws_random_numbers_is_judged_by_its_mean(of: str, what: str) -> None:
    noisy = {"_target_": "weighed.noisy", "of": of}
    with pytest.raises(ExperimentError, match=f"loss: {what} .* on average over 64 draws of its random numbers"):
        built(loss=noisy, accumulation=2)


def test_a_loss_that_fails_at_changed_weights_is_taken_with_a_warning() -> None:
    said = built(**LINE, loss={"_target_": "weighed.of_zeros"}, accumulation=2).seen.unexamined
    assert said.startswith("the loss is a mean over the samples at the initial weights")


def test_noise_that_only_gradients_show_is_no_other_loss() -> None:
    assert built(**LINE, loss={"_target_": "weighed.noisy_inside"}, accumulation=2).seen.unexamined == ""


@pytest.mark.parametrize("draws", [False, True])
def test_padding_and_a_collate_that_draws_are_no_other_loss(draws: bool) -> None:
    """The embedding of padding stays 0; a batch that is read again may have other words masked."""
    sections = {"model": {"_target_": "weighed.SummedWords"}, "data": {"_target_": "weighed.sentences"}}
    collate = {"_target_": "weighed.pad_sentences", "draws": draws}
    loss = {"_target_": "torch.nn.CrossEntropyLoss"}
    assert built(**sections, loss=loss, loader={"collate": collate}, accumulation=2).seen.unexamined == ""


@pytest.mark.parametrize("how", ["always", "rarely", "always own", "fields", "fields own"])
def test_a_loss_is_not_blamed_for_what_a_collate_draws(how: str) -> None:
    task = {"loss": None, "task": {"_target_": "weighed.OfBothTargets"}}
    plain = {"_target_": "torch.utils.data.default_collate"}
    for seed in range(3):
        loader = {"collate": {"_target_": "weighed.mixing", "how": how}, "evaluation_collate": plain}
        context = built(**(task if "fields" in how else {}), loader=loader, accumulation=2, seed=seed)
        assert context.seen.unexamined == (UNLIKE if "fields" in how else "")


UNLIKE = (
    "the loss could not be checked: the batches of loader.collate differ each time they are read. It must be a mean "
    "over the samples, or training depends on the number of workers."
)


def test_a_loss_that_draws_random_numbers_may_be_a_little_off() -> None:
    """As those of detectors are, which sample proposals."""
    noisy = {"_target_": "weighed.noisy", "of": "compared", "noise": 0.01}
    assert built(loss=noisy, accumulation=2).seen.unexamined == ""


@pytest.mark.parametrize(
    ("loss", "why"), [("weighed.swinging", "it draws random numbers"), ("weighed.undefined", "it is nan for 5 samples")]
)
def test_a_loss_whose_draws_tell_nothing_is_taken_with_a_warning(loss: str, why: str) -> None:
    said = built(loss={"_target_": loss}, accumulation=2).seen.unexamined
    assert said.startswith(f"the loss could not be checked: {why}")
    assert built(loss={"_target_": loss}).seen.unexamined == ""


def test_nothing_is_left_of_the_trial() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    before = build(toys.trial(model={"_target_": "toys.rich_net"}), rank=Rank())
    torch.manual_seed(7)
    context = built(model={"_target_": "toys.rich_net"}, loss={"_target_": "weighed.Counting"}, accumulation=2)
    assert isinstance(context.task, Supervised)
    assert context.task.loss.calls == 0
    state = context.model.state_dict()

    assert all(parameter.grad is None for parameter in context.model.parameters())
    assert all(torch.equal(value, state[name]) for name, value in before.model.state_dict().items())
    assert context.model.training
    torch.manual_seed(7)
    assert torch.rand(1) == expected


def test_torchs_own_losses_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    supervised = Supervised.__call__
    monkeypatch.setattr(Supervised, "__call__", lambda *given: calls.append(1) or supervised(*given))

    assert built().seen.gives_weight is None
    assert not calls


def test_smoothing_with_a_class_that_counts_nothing_is_refused() -> None:
    with pytest.raises(ExperimentError, match="loss: label_smoothing with a class weight of 0"):
        Supervised(torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.0]), label_smoothing=0.1))


@pytest.mark.parametrize(
    ("loss", "targets", "weight"),
    [
        (torch.nn.CrossEntropyLoss(), torch.tensor([0, 2]), None),
        (torch.nn.CrossEntropyLoss(), torch.tensor([[0, -100, 1], [1, 2, -100]]), 4),
        (torch.nn.CrossEntropyLoss(ignore_index=2), torch.tensor([0, 2]), 1),
        (torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.5])), torch.tensor([0, 2]), 1.5),
        (torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.5])), torch.eye(3)[:2], 2),
        (torch.nn.NLLLoss(weight=torch.tensor([1.0, 5.0, 0.5])), torch.tensor([-100, 1]), 5),
        (torch.nn.MSELoss(), torch.zeros(2, 3), None),
    ],
)
def test_the_weight_is_what_torch_divides_by(loss: Any, targets: torch.Tensor, weight: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    places = () if targets.is_floating_point() else targets.shape[1:]
    outputs = torch.randn(2, 3, *places, generator=generator)
    output = Supervised(loss)(torch.nn.Identity(), (outputs.log_softmax(1), targets))

    assert output.weight == weight
    if output.weight is not None:
        loss.reduction = "sum"
        assert float(loss(outputs.log_softmax(1), targets) / output.weight) == pytest.approx(float(output.loss))


def test_ignored_labels_must_be_declared() -> None:
    """Only then are the others counted, which takes an exchange."""
    sections = {"model": {**BOXES["model"], "out_features": 4}, "data": {"_target_": "weighed.points", "ignored": 3}}
    plain = {"_target_": "torch.nn.CrossEntropyLoss"}
    with pytest.raises(ExperimentError, match=r"loss: some targets are -100, .* Set ignore_index: -100"):
        next(_first(built(**sections, loss=plain)))
    assert next(_first(built(**sections, loss={**plain, "ignore_index": -100})))


def _first(context: TrainContext) -> Any:
    return context.batches.training(0)


def test_a_loss_that_fails_on_few_samples_is_told_of() -> None:
    """It may be a sum, which would train something else on more workers, and nobody has seen it."""
    context = built(loss={"_target_": "weighed.of_many"})

    assert context.seen.unexamined.startswith("the loss could not be checked: it raised ValueError on 5 samples")
    assert built(loss={"_target_": "weighed.compared"}).seen.unexamined == ""


def test_the_warning_reaches_the_user_before_the_first_step() -> None:
    trial = toys.trial(max_steps=1, loss={"_target_": "weighed.of_many"}, train={"global_batch_size": 8})
    outbox = toys.Kept()
    train(trial.model_copy(update={"allowed": (*BUILT_IN, "toys", "weighed")}), rank=Rank(), outbox=outbox)

    kinds = [event.kind for event in outbox.events]
    (warned,) = [event for event in outbox.events if isinstance(event, Warned)]
    assert "8 samples at least" in warned.message
    assert kinds.index("warned") < kinds.index("first_step")
