"""What a task computes from a batch, what is said of losses that are not means, and of those that fail."""

# promise: losses weighted by tokens or class weights; other losses are refused
# promise: logs and losses of an evaluation are means; each metric is that of all samples
# promise: logs of a task, early stopping, evaluation within epochs, a finished run continued

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toys
import weighed
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from pipeline.errors import ExperimentError
from pipeline.models import GPT
from pipeline.protocol.trial import Rank
from pipeline.tasks import LanguageModel, Loss, Supervised, Trainee, count_samples
from pipeline.train.build import build
from pipeline.train.checks import check_log_names
from pipeline.train.errors import explain, hint
from pipeline.train.state import State


def paired() -> tuple[Dataset[Any], None]:
    """Two inputs in each sample."""
    return toys.Plain([((torch.ones(3), torch.ones(3)), torch.ones(1))] * 8), None


def flat_net() -> nn.Module:
    """Its outputs have no dimension of size 1, as the targets have."""
    return nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))


class Rarely:
    """A sum over nothing in each batch but the first, whose log is NaN there, as a mean over nothing is."""

    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        outputs = model(batch[0])
        there = (batch[1] > 0).sum()
        return Loss((outputs * 0).sum() + there, there, outputs, batch[1], {"share": 0.5 * there / there})


HERE = "test_tasks"

WEIGHTS = torch.tensor([1.0, 5.0, 0.5])

ONE, ROW = torch.ones(()), torch.ones(1)


def task(target: str, **sections: Any) -> dict[str, Any]:
    return {"task": {"_target_": target}, "loss": None, **sections}


# The tasks that come along


def test_the_loss_of_a_transformers_model_is_that_of_its_logits() -> None:
    class Model(nn.Linear):
        def forward(self, inputs: Tensor) -> Any:
            return SimpleNamespace(logits=super().forward(inputs))

    loss = Supervised(nn.CrossEntropyLoss())(Model(3, 2), (torch.randn(2, 3), torch.tensor([0, 1])))
    assert loss.outputs.shape == (2, 2)


@pytest.mark.parametrize(
    ("loss", "targets", "count"),
    [
        (nn.CrossEntropyLoss(), torch.tensor([0, 2]), None),
        (nn.CrossEntropyLoss(), torch.tensor([[0, -100, 1], [1, 2, -100]]), 4),
        (nn.CrossEntropyLoss(ignore_index=2), torch.tensor([0, 2]), 1),
        (nn.CrossEntropyLoss(weight=WEIGHTS.double()), torch.tensor([0, 2]), 1.5),
        (nn.CrossEntropyLoss(weight=torch.tensor([1, 5, 1])), torch.tensor([0, 1]), 6),
        (nn.CrossEntropyLoss(weight=WEIGHTS), torch.eye(3)[:2], None),
        (nn.CrossEntropyLoss(weight=WEIGHTS), torch.ones(2, 3, 2) / 3, 4),
        (nn.NLLLoss(weight=WEIGHTS), torch.tensor([-100, 1]), 5),
        (nn.MSELoss(), torch.zeros(2, 3), None),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1, 2, 3])), torch.zeros(2, 3), None),
    ],
)
def test_the_count_is_what_torch_divides_by(loss: Any, targets: Tensor, count: float | None) -> None:
    places = targets.shape[2:] if targets.is_floating_point() else targets.shape[1:]
    outputs = torch.randn(2, 3, *places, generator=torch.Generator().manual_seed(0)).log_softmax(1)
    found = Supervised(loss)(nn.Identity(), (outputs, targets))
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        loss.reduction = "mean"
    assert found.count == count
    torch.testing.assert_close(found.sum / (2 if found.count is None else found.count), loss(outputs, targets))


def test_language_model_is_the_mean_over_all_tokens_but_padding() -> None:
    model = GPT(16, context_length=6, width=8, depth=1, heads=2)
    tokens, targets = torch.randint(16, (2, 3, 6)).unbind()
    targets[1:, 4:] = -100
    loss = LanguageModel()(model, (tokens, targets))
    torch.testing.assert_close(loss.sum / loss.count, functional.cross_entropy(model(tokens).transpose(1, 2), targets))
    assert (loss.count, loss.outputs.shape) == (14, (18, 16))
    assert torch.equal(loss.targets, targets.flatten())


def test_ignored_labels_must_be_declared() -> None:
    """Only then are the others counted, which takes an exchange."""
    batch = torch.randn(3, 4), torch.tensor([0, -100, 2])
    with pytest.raises(ExperimentError, match=r"loss: some targets are -100, .* Set ignore_index: -100"):
        Supervised(nn.CrossEntropyLoss())(nn.Identity(), batch)
    assert Supervised(nn.CrossEntropyLoss(), ignores=True)(nn.Identity(), batch).count == 2


def returning(value: Any) -> Trainee:
    return Trainee(nn.Identity(), lambda model, batch: value)


LABELS = Supervised(nn.CrossEntropyLoss())
NO_TENSOR = torch.zeros(2), torch.zeros(2)
REFUSED: list[tuple[Callable[[], object], str]] = [
    *(
        (lambda one=one, batch=batch: one(nn.Identity(), batch), rf"data: a batch is {what}.*set `task:`")
        for one in (LABELS, LanguageModel())
        for batch, what in (
            (torch.zeros(4, 3), r"a tensor of shape \(4, 3\), not \(inputs, targets\)"),
            ({"pixels": ROW, "label": ROW}, "a mapping with the keys pixels, label"),
            ((ROW,) * 3, r"a tuple of 3: .*, not \(inputs, targets\)"),
        )
    ),
    *(
        (lambda one=one: Supervised(nn.CrossEntropyLoss(reduction=one)), f"loss: reduction '{one}' .* set reduction: m")
        for one in ("sum", "none")
    ),
    *(
        (lambda value=value: Supervised(lambda outputs, targets: value)(nn.Identity(), NO_TENSOR), f"loss: is {what}")
        for value, what in (
            (torch.zeros(2), r"a tensor of shape \(2,\), not a scalar"),
            (0.5, "of type float, not a scalar"),
        )
    ),
    *(
        (lambda value=value: returning(value)([ROW]), f"task: {what}")
        for value, what in (
            (ROW, r"returned a tensor of shape \(1,\); return Loss\(sum, count\), or a scalar, the mean over the sam"),
            ((ONE, ONE), r"returned a tuple; return Loss"),
            (Loss(ROW), r"returned a tensor of shape \(1,\) as Loss\.sum; it must be a scalar tensor"),
            (Loss(ONE, ROW), r"returned a tensor of shape \(1,\) as Loss\.count; it must be a scalar tensor"),
            (Loss(ONE, 3), r"returned a int as Loss\.count"),
            (Loss(ONE, logs=[ONE]), r"Loss\.logs is a list of 1: Tensor \(\), not a mapping from names"),
        )
    ),
    *(
        (lambda logs=logs: returning(Loss(ONE, logs=logs))(torch.ones(3)), rf"task: Loss\.logs has {what}")
        for logs, what in (
            ({"loss": ONE}, "the name loss, but train/loss is already reported; choose another name"),
            ({"a?": ONE, "a!": ONE}, "the name a!, but train/a_ is already reported"),
            ({3: ONE}, "the name 3; use a non-empty string"),
            ({"kl": 0.5}, "a float as kl; it must be a scalar tensor"),
            ({"kl": torch.ones(3)}, r"a tensor of shape \(3,\) as kl; it must be a scalar tensor"),
        )
    ),
    (lambda: count_samples("text"), "task: a batch is of type str, whose samples can't be counted; return L"),
    (lambda: check_log_names({0: ("kl",), 1: ()}), "has kl on rank 0, nothing on rank 1; return the same"),
]


@pytest.mark.parametrize(("call", "said"), REFUSED, ids=[said[:60] for _, said in REFUSED])
def test_what_is_no_loss_is_refused(call: Callable[[], object], said: str) -> None:
    with pytest.raises(ExperimentError, match=said):
        call()


def test_batches_that_return_something_else_than_the_first_one_are_refused() -> None:
    counted = Trainee(nn.Identity(), lambda model, batch: Loss(ONE, ONE if len(batch) > 1 else None))
    counted(torch.ones(2))
    with pytest.raises(ExperimentError, match=r"task: returns Loss\.count for some batches and None for others; ret"):
        counted(ROW)
    logged = Trainee(nn.Identity(), lambda model, batch: Loss(ONE, logs=batch))
    logged({"kl": ONE})
    with pytest.raises(ExperimentError, match=r"has nothing in one batch, but kl in the first\. Return the same names"):
        logged({})
    for logs in ({}, {"own": ONE}):
        logged.eval()  # each evaluation has its own
        logged(logs)


@pytest.mark.parametrize(
    "batch",
    [torch.ones(3, 2), [0, torch.ones(3)], {"size": ONE, "x": torch.ones(3, 1)}, ({"x": torch.ones(3)}, 1), ([1] * 3,)],
)
def test_samples_are_the_rows_of_a_batch(batch: Any) -> None:
    assert count_samples(batch) == 3


def test_after_a_failed_pass_no_batch_is_taken_for_its_own() -> None:
    with pytest.raises(LookupError):
        toys.trained(model={"_target_": "toys.BrokenModel"})
    assert count_samples(torch.ones(3)) == 3


def test_what_metrics_get_has_no_graph_and_is_kept_where_they_do() -> None:
    trainee = Trainee(nn.Linear(3, 1), lambda model, batch: Loss((o := model(batch)).sum(), None, {"o": [o]}, (o,)))
    assert trainee(torch.ones(2, 3)).outputs is None
    trainee.keeps_outputs = True
    loss = trainee(torch.ones(2, 3))
    assert loss.sum.requires_grad
    assert not loss.outputs["o"][0].requires_grad
    assert not loss.targets[0].requires_grad


# Logs


def test_training_and_validation_report_logs() -> None:
    (_, plain), (result, logged) = toys.trained(), toys.trained(**task("toys.Logged"))
    for name in ("train", "validation"):
        assert logged.series(f"{name}/loss") == plain.series(f"{name}/loss")
        twice = [2 * loss for loss in plain.series(f"{name}/loss")]
        assert logged.series(f"{name}/twice") == pytest.approx(twice, rel=1e-12)
    assert set(logged.series("train/count")) == {8.0, 6.0}, "of 22 samples"
    assert "validation/count" not in result.metrics
    assert not logged.warnings


def test_batches_without_items_do_not_count() -> None:
    _, kept = toys.trained(**task("test_tasks.Rarely"), train={"global_batch_size": 1})
    assert set(kept.series("train/share")) == {0.0, 0.5}  # not NaN
    assert kept.series("validation/share") == [pytest.approx(0.5)] * len(kept.series("validation/share"))


# Losses that the number of workers or micro-batches would change


CLASSES = {"model": {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": weighed.CLASSES}}


POINTS = CLASSES | {"data": {"_target_": "weighed.points"}}


BOXES = CLASSES | {"data": {"_target_": "weighed.boxes"}}


TOKENS = {"model": {"_target_": "weighed.tagger"}, "data": {"_target_": "weighed.tokens"}}


PAIRS = CLASSES | {"data": {"_target_": "toy_contrastive.pairs"}}


def _many(outputs: Tensor, _: Tensor) -> Tensor:
    if len(outputs) < 6:
        raise ValueError("too few")
    return outputs.mean()


LOSSES: dict[str, Any] = {
    "sum": lambda outputs, targets: (outputs - targets).square().sum(),
    "root": lambda outputs, targets: (outputs - targets).square().mean().sqrt(),
    "compared": lambda outputs, targets: (outputs - outputs.mean(0)).square().mean(),
    "mean": lambda outputs, targets: (outputs - targets).abs().pow(1.5).mean(),
    "drawn": lambda outputs, targets: (outputs + torch.rand_like(outputs) - targets).square().sum(),
    "infinite": lambda outputs, targets: (outputs - targets).square().sum() / 0,
    "many": _many,
}


def loss(of: str) -> Any:
    return LOSSES[of]


class Contrast:
    """Compares the samples of a rank's batch alone."""

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        first, second = (model(view) for view in batch[0].unbind(1))
        return functional.cross_entropy(first @ second.T, torch.arange(len(first)))


class WrongCount(weighed.Detection):
    """Counts one box too many in each batch, as one that clamps does."""

    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().__call__(model, batch)
        assert loss.count is not None
        return loss._replace(count=loss.count + 1)


def own(of: str, **sections: Any) -> dict[str, Any]:
    return {"loss": {"_target_": f"{HERE}.loss", "of": of}, **sections}


def built(*, accumulation: int = 2, **sections: Any) -> tuple[State, list[str]]:
    """A training that is built, and its warnings."""
    train, outbox = {"gradient_accumulation": accumulation, **sections.pop("train", {})}, toys.Kept()
    return toys.built(**sections, train=train, outbox=outbox), outbox.warnings


@pytest.mark.parametrize(
    "sections",
    [
        own("sum"), own("root"), own("compared"),
        task("weighed.Untold", **TOKENS), task(f"{HERE}.WrongCount", **BOXES), task(f"{HERE}.Contrast", **PAIRS),
    ],
    ids=["sum", "root", "compared", "tokens", "a wrong count", "contrast"],
)  # fmt: skip
def test_a_loss_that_is_no_mean_over_the_samples_is_named(sections: dict[str, Any]) -> None:
    _, (said,) = built(**sections)
    key = "task" if "task" in sections else "loss"
    assert said.startswith(f"{key}: it is not a mean over the samples. The parts of 5 samples have ")
    assert said.endswith(
        "Return Loss(sum, count), or compare the samples of a global batch with pipeline.tasks.gathered."
    )
    assert built(**sections, accumulation=1)[1] == [], "one process sees whole batches"


@pytest.mark.parametrize(
    "sections",
    [
        own("mean"), own("mean", train={"precision": "bf16"}), own("drawn"), own("infinite"),
        {"loss": {"_target_": "torch.nn.CrossEntropyLoss", "weight": [1, 5, 2, 0.5]}, **POINTS},
        task("weighed.Tagging", **TOKENS), task("pipeline.tasks.LanguageModel", **TOKENS),
        task("weighed.Detection", **BOXES), task("weighed.Splitting", **POINTS),
        task("toy_contrastive.Similar", **PAIRS),
    ],
    ids=["mean", "in 16 bits", "random", "infinite", "torch's", "tokens", "language", "boxes", "terms", "gathered"],
)  # fmt: skip
def test_nothing_is_said_of_means_nor_of_what_shows_nothing(sections: dict[str, Any]) -> None:
    assert built(**sections)[1] == []


def test_a_loss_that_a_few_samples_are_too_few_for_is_not_checked_and_said_to_be() -> None:
    _, (said,) = built(**own("many"))
    assert said == "not checked if the loss is a mean over the samples: with 5 samples it raised too few"


def test_nothing_is_left_of_the_comparison() -> None:
    net = {"model": {"_target_": "toys.rich_net"}}
    s, _ = built(**net, **own("drawn"))
    drawn = torch.rand(1)
    before, _ = built(**net, loss={"_target_": "torch.nn.MSELoss"})  # compares nothing
    assert torch.rand(1) == drawn
    assert all(torch.equal(one, before.model.state_dict()[name]) for name, one in s.model.state_dict().items())
    assert all(parameter.grad is None for parameter in s.model.parameters())
    assert s.trainee.training


# torch's errors, with the shapes, types and values that torch doesn't name

INPUTS = torch.randn(4, 3)


def raised(call: Callable[[], object]) -> Exception:
    with warnings.catch_warnings(action="ignore"), pytest.raises(Exception) as info:  # noqa: PT011 (any)
        call()
    return info.value


@pytest.fixture(scope="module")
def s() -> State:
    return build(toys.trial(), rank=Rank())


def entropy(outputs: Any, targets: Any) -> Callable[[], object]:
    return lambda: nn.CrossEntropyLoss()(outputs, targets)


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (entropy(INPUTS, torch.tensor([0, 1, 2, 3])), "Targets are from 0 to 3, but 3 classes are numbered 0 to 2; "
         "give the model 4 outputs, or number the classes from 0"),
        (entropy(INPUTS, torch.tensor([-1, 2, -100, 1])), "Targets are from -1 to 2, but 3 classes are numbered 0 to "
         "2; number the classes from 0, or set ignore_index: -1 to ignore these targets"),
        (entropy(INPUTS, torch.zeros(4)), "targets of shape (4,) (float32), but class numbers must be int64; return "
         "targets.long() from the dataset"),
        (entropy(INPUTS, torch.zeros(4, 1, dtype=torch.int64)), "for 3 classes, targets must have the shape (4,)"),
        (entropy(INPUTS, torch.zeros(4, 3, dtype=torch.int64)), "needs the same type for both; return targets.float"),
        (entropy((INPUTS, None), torch.zeros(4)), "a tensor of outputs, but got a tuple of 2: Tensor (4, 3), NoneTyp"),
        (entropy(INPUTS, [0, 1, 2, 0]), "needs a tensor of targets, but got a list of 4: int, int, int, int; set `ta"),
        (lambda: functional.mse_loss(INPUTS, torch.ones(4, 2)), "gets outputs of shape (4, 3) (float32) and targets "
         "of shape (4, 2) (float32); give both the same shape"),
        (lambda: functional.binary_cross_entropy(torch.ones(4), torch.ones(4).long()), "(int64), but needs the same "
         "type for both; return targets.float() from the dataset"),
    ],
)  # fmt: skip
def test_losses_tell_what_they_got(s: State, fails: Callable[[], object], said: str) -> None:
    with pytest.raises(ExperimentError) as info:
        explain(raised(fails), s, None)
    assert said in str(info.value)


def test_other_errors_keep_torch_s_words(s: State) -> None:
    explain(raised(lambda: INPUTS @ INPUTS), s, None)
    explain(raised(lambda: functional.cross_entropy(INPUTS, torch.tensor([0, 1, 2, 0]), torch.ones(2))), s, None)


FLAT = {"model": {"_target_": "test_tasks.flat_net"}}
SPREAD = "gets outputs of shape (8,) (float64) and targets of shape (8, 1) (float64); return targets.squeeze(-1) from"
ENTROPY = {"data": {"_target_": "toys.classification"}, "loss": {"_target_": "torch.nn.CrossEntropyLoss"}}


@pytest.mark.filterwarnings("ignore::UserWarning")  # as outside of tests
@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({**ENTROPY, "model": {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 2}},
         "loss: gets outputs of shape (8, 2) (float64) and targets of shape (8,) (int64). Targets are from 0 to 2, but "
         "2 classes are numbered 0 to 1; give the model 3 outputs, or number the class"),
        ({**ENTROPY, "model": {"_target_": "torch.nn.LSTM", "input_size": 3, "hidden_size": 3}},
         "loss: needs a tensor of outputs, but got a tuple of 2: Tensor (8, 3), tuple; set `task:` to a class that"),
        # Most losses broadcast with a warning that only the rank's log has, the others in silence.
        *(({**FLAT, "loss": {"_target_": f"torch.nn.{name}"}}, f"loss: {SPREAD}")
          for name in ("MSELoss", "L1Loss", "HuberLoss", "SmoothL1Loss", "PoissonNLLLoss", "SoftMarginLoss")),
        (task("toys.SquaredTask", **FLAT), f"task: {SPREAD}"),
        ({"model": {"_target_": "torch.nn.Bilinear", "in1_features": 3, "in2_features": 3, "out_features": 1},
          "data": {"_target_": "test_tasks.paired"}},
         "model: is called with one argument, the batch's inputs (a list of 2: Tensor (8, 3), Tensor (8, 3)), but "
         "Bilinear.forward() missing 1 required positional argument: 'input2'. Set `task:` to a class"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_experiment_is_refused_with_its_key(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ExperimentError) as info:
        toys.trained(**sections)
    assert str(info.value).startswith(said)


def test_what_broadcasts_to_no_more_elements_is_trained() -> None:
    """A sample alone: outputs of shape (1,) and targets of (1, 1) are one pair."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        assert toys.trained(**FLAT, train={"global_batch_size": 1, "epochs": 1})[0].losses


def double_targets() -> Any:
    return functional.huber_loss(torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.float64))


TYPES = "; inputs and weights have different types"


def test_usual_errors_of_torch_have_a_hint_and_the_name_of_the_layer(s: State) -> None:
    doubles, model = torch.ones(3, 2, dtype=torch.float64), nn.Sequential(nn.Flatten(), nn.Linear(7, 1))
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: nn.Embedding(4, 2)(torch.tensor([4])), "; in Embedding(4, 2); compare the index with num_embeddings"),
        (lambda: double_targets().backward(), "; return targets.float() from the dataset"),
        (lambda: nn.Linear(2, 1)(doubles), TYPES),
        (lambda: nn.Conv1d(2, 1, 1)(torch.ones(3, 2, 4).byte()), TYPES),
        (lambda: nn.LayerNorm(2)(doubles), TYPES),
        (lambda: model(torch.ones(2, 3)), "; in layer 1: Linear(in_features=7, out_feat"),
        (lambda: s.trainee((torch.ones(2, 4), 0)), "; in Linear(in_features=3, out_feat"),
    ]
    for fails, said in cases:
        assert said in hint(raised(fails))
    assert hint(raised(lambda: INPUTS @ INPUTS)) == ""
