"""The models that the package brings along: shapes, names, sizes, and what they must not see."""

from typing import Any

import pytest
import torch
from torch import nn

from pipeline.errors import ExperimentError
from pipeline.models import GPT, MLP, resnet18, resnet50

BOTH = pytest.mark.parametrize("make", [resnet18, resnet50])


# Residual networks


def test_resnet_has_torchvisions_sizes_names_and_shapes() -> None:
    with torch.device("meta"):  # shapes alone
        small, large = (make(num_classes=1000, stem="imagenet") for make in (resnet18, resnet50))
    assert sum(parameter.numel() for parameter in small.parameters()) == 11_689_512
    assert sum(parameter.numel() for parameter in large.parameters()) == 25_557_032
    shapes = {name: tuple(value.shape) for name, value in large.state_dict().items()}
    assert len(shapes) == 320  # as torchvision.models.resnet50's
    expected = {
        "conv1.weight": (64, 3, 7, 7), "bn1.running_mean": (64,), "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer1.0.downsample.1.num_batches_tracked": (), "layer2.0.conv2.weight": (128, 128, 3, 3),
        "layer4.2.bn3.bias": (2048,), "fc.weight": (1000, 2048),
    }  # fmt: skip
    assert shapes.items() >= expected.items()
    assert "layer1.1.downsample.0.weight" not in shapes


@BOTH
@pytest.mark.parametrize(("stem", "side"), [("cifar", 32), ("imagenet", 8)])
def test_resnet_maps_images_to_logits_and_its_stem_sets_the_size_of_the_first_stage(
    make: Any, stem: str, side: int
) -> None:
    model, sizes = make(num_classes=7, width=4, in_channels=1, stem=stem), []
    model.layer1.register_forward_hook(lambda module, inputs, output: sizes.append(output.shape[-1]))
    assert model(torch.randn(2, 1, 32, 32)).shape == (2, 7)
    assert sizes == [side]


@BOTH
def test_group_normalization_makes_samples_independent_of_the_batch(make: Any) -> None:
    model, images = make(2, width=8, norm="group"), torch.rand(4, 3, 16, 16)
    assert [norm.num_groups for norm in (model.bn1, model.layer1[0].bn2, model.layer4[0].bn2)] == [2, 2, 16]
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    torch.testing.assert_close(model(images)[:1], model(images[:1]))


@BOTH
@pytest.mark.parametrize("zero", [True, False])
def test_zero_init_residual_starts_each_block_as_its_shortcut(make: Any, zero: bool) -> None:
    block = make(2, width=4, zero_init_residual=zero).layer1[1].eval()
    features = torch.rand(2, block.last_norm.num_features, 8, 8)
    assert torch.equal(block(features), features) == zero


# Multilayer perceptron


def test_mlp_flattens_stacks_its_layers_and_drops_out_only_in_training() -> None:
    model = MLP(64, hidden=[32, 16], num_classes=10)
    assert model(torch.randn(3, 1, 8, 8)).shape == (3, 10)
    assert sum(p.numel() for p in model.parameters()) == (64 + 1) * 32 + (32 + 1) * 16 + (16 + 1) * 10
    assert [type(layer) for layer in MLP(4, hidden=[], num_classes=2).layers] == [nn.Flatten, nn.Linear]
    model, inputs = MLP(16, hidden=[64], num_classes=4, dropout=0.5), torch.randn(1, 16)
    assert not torch.equal(model(inputs), model(inputs))
    model.eval()
    assert torch.equal(model(inputs), model(inputs))


# GPT


def gpt(**changes: Any) -> Any:
    torch.manual_seed(0)
    return GPT(**{"vocabulary_size": 16, "context_length": 8, "width": 12, "depth": 2, "heads": 3} | changes)


@pytest.mark.parametrize("changed", [1, 4, 7])
def test_gpt_does_not_see_later_tokens(changed: int) -> None:
    model, tokens = gpt().eval(), torch.randint(16, (1, 8))
    other = tokens.clone()
    other[0, changed] = (tokens[0, changed] + 1) % 16
    before, after = model(tokens), model(other)
    assert before.shape == (1, 8, 16)
    torch.testing.assert_close(after[:, :changed], before[:, :changed])
    assert not torch.allclose(after[:, changed:], before[:, changed:])


def test_gpt_ties_the_embedding_to_the_output() -> None:
    width, vocabulary, context, depth = 12, 16, 8, 2
    norm = 2 * width
    block = (width + 1) * 3 * width + (width + 1) * width + (width + 1) * 4 * width + (4 * width + 1) * width + 2 * norm
    assert sum(p.numel() for p in gpt().parameters()) == (vocabulary + context) * width + depth * block + norm


def test_gpt_scales_what_adds_to_the_residual_stream() -> None:
    block = gpt(width=192, depth=8).blocks[0]
    for layer, scale in ((block.expand, 1), (block.project, 4), (block.attention.project, 4)):
        assert layer.weight.std().item() == pytest.approx(0.02 / scale, rel=0.05)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: resnet18(2, stem="mnist"), r"model\.stem: is 'mnist'; write cifar"),  # type: ignore[arg-type]
        (lambda: resnet18(2, norm="layer"), r"model\.norm: is 'layer'\. Set it to batch or group\."),  # type: ignore[arg-type]
        (lambda: gpt(heads=5), r"model\.heads: is 5, which doesn't divide model\.width: 12"),
        (lambda: gpt()(torch.zeros(1, 9).long()), r"model\.context_length: is 8, but a sample has 9 tokens"),
    ],
)
def test_what_a_model_can_not_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        make()
