"""The models that the package brings along: shapes, names, sizes, and what they must not see."""

import pytest
import torch
from torch import nn

from pipeline.errors import ExperimentError
from pipeline.models import GPT, MLP, resnet18, resnet50


@pytest.mark.parametrize(
    ("make", "parameters"),
    [(resnet18, 11_689_512), (resnet50, 25_557_032)],
)
def test_resnet_has_as_many_parameters_as_torchvision_states(make, parameters):
    with torch.device("meta"):  # shapes alone
        model = make(num_classes=1000, stem="imagenet")

    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_resnet_has_torchvisions_names_and_shapes():
    with torch.device("meta"):
        shapes = {name: tuple(value.shape) for name, value in resnet50(1000, stem="imagenet").state_dict().items()}

    assert len(shapes) == 320  # as torchvision.models.resnet50's
    assert shapes["conv1.weight"] == (64, 3, 7, 7)
    assert shapes["bn1.running_mean"] == (64,)
    assert shapes["layer1.0.downsample.0.weight"] == (256, 64, 1, 1)
    assert shapes["layer1.0.downsample.1.num_batches_tracked"] == ()
    assert shapes["layer2.0.conv2.weight"] == (128, 128, 3, 3)
    assert shapes["layer4.2.bn3.bias"] == (2048,)
    assert shapes["fc.weight"] == (1000, 2048)
    assert "layer1.1.downsample.0.weight" not in shapes


@pytest.mark.parametrize("make", [resnet18, resnet50])
def test_resnet_maps_small_images_to_logits(make):
    model = make(num_classes=7, width=4, in_channels=1)

    assert model(torch.randn(2, 1, 16, 16)).shape == (2, 7)


@pytest.mark.parametrize(("stem", "side"), [("cifar", 32), ("imagenet", 8)])
def test_resnet_stem_sets_the_size_of_the_first_stage(stem, side):
    model = resnet18(2, width=4, stem=stem)
    sizes = []
    model.layer1.register_forward_hook(lambda module, inputs, output: sizes.append(output.shape[-1]))

    model(torch.randn(2, 3, 32, 32))

    assert sizes == [side]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stem": "mnist"}, r"model\.stem: is 'mnist'; write cifar"),
        ({"norm": "layer"}, r"model\.norm: is 'layer'\. Set it to batch or group\."),
    ],
)
def test_resnet_with_an_unknown_part_is_rejected(arguments, message):
    with pytest.raises(ExperimentError, match=message):
        resnet18(2, **arguments)


@pytest.mark.parametrize("make", [resnet18, resnet50])
def test_group_normalization_makes_samples_independent_of_the_batch(make):
    model = make(2, width=8, norm="group")
    images = torch.rand(4, 3, 16, 16)

    assert [norm.num_groups for norm in (model.bn1, model.layer1[0].bn2, model.layer4[0].bn2)] == [2, 2, 16]
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules())
    torch.testing.assert_close(model(images)[:1], model(images[:1]))


@pytest.mark.parametrize("make", [resnet18, resnet50])
def test_zero_init_residual_starts_each_block_as_its_shortcut(make):
    block = make(2, width=4, zero_init_residual=True).layer1[1].eval()
    features = torch.rand(2, block.last_norm.num_features, 8, 8)

    assert torch.equal(block(features), features)


def test_residual_branch_takes_part_without_zero_init():
    block = resnet18(2, width=4).layer1[1].eval()
    features = torch.rand(2, 4, 8, 8)

    assert not torch.allclose(block(features), features)


def test_mlp_flattens_and_stacks_its_layers():
    model = MLP(64, hidden=[32, 16], num_classes=10)

    assert model(torch.randn(3, 1, 8, 8)).shape == (3, 10)
    assert sum(p.numel() for p in model.parameters()) == (64 + 1) * 32 + (32 + 1) * 16 + (16 + 1) * 10


def test_mlp_without_hidden_layers_is_linear():
    model = MLP(4, hidden=[], num_classes=2)

    assert [type(layer) for layer in model.layers] == [nn.Flatten, nn.Linear]


def test_mlp_drops_out_only_in_training():
    model = MLP(16, hidden=[64], num_classes=4, dropout=0.5)
    inputs = torch.randn(1, 16)

    assert not torch.equal(model(inputs), model(inputs))
    model.eval()
    assert torch.equal(model(inputs), model(inputs))


def gpt(**changes):
    torch.manual_seed(0)
    return GPT(**{"vocabulary_size": 16, "context_length": 8, "width": 12, "depth": 2, "heads": 3} | changes)


def test_gpt_gives_logits_for_each_token():
    assert gpt()(torch.randint(16, (2, 5))).shape == (2, 5, 16)


@pytest.mark.parametrize("changed", range(1, 8))
def test_gpt_does_not_see_later_tokens(changed):
    model = gpt().eval()
    tokens = torch.randint(16, (1, 8))
    other = tokens.clone()
    other[0, changed] = (tokens[0, changed] + 1) % 16

    before, after = model(tokens), model(other)

    torch.testing.assert_close(after[:, :changed], before[:, :changed])
    assert not torch.allclose(after[:, changed:], before[:, changed:])


def test_gpt_sees_earlier_tokens_and_their_order():
    model = gpt().eval()
    nn.init.normal_(model.position.weight)  # the small initial positions hardly show in the logits

    first, second = model(torch.tensor([[1, 2, 3]])), model(torch.tensor([[2, 1, 3]]))

    assert not torch.allclose(first[:, -1], second[:, -1])


def test_gpt_ties_the_embedding_to_the_output():
    width, vocabulary, context, depth = 12, 16, 8, 2
    norm = 2 * width
    block = (width + 1) * 3 * width + (width + 1) * width + (width + 1) * 4 * width + (4 * width + 1) * width + 2 * norm

    parameters = sum(p.numel() for p in gpt().parameters())

    assert parameters == (vocabulary + context) * width + depth * block + norm


def test_gpt_starts_near_the_uniform_distribution():
    loss = nn.functional.cross_entropy(gpt()(torch.randint(16, (8, 8))).flatten(0, 1), torch.randint(16, (64,)))

    assert loss.item() == pytest.approx(torch.tensor(16.0).log().item(), abs=0.1)


def test_gpt_scales_what_adds_to_the_residual_stream():
    model = gpt(width=192, depth=8)

    assert model.blocks[0].expand.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.blocks[0].project.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert model.blocks[0].attention.project.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


def test_gpt_with_an_uneven_width_is_refused():
    with pytest.raises(ExperimentError, match=r"model\.heads: is 5, which doesn't divide model\.width: 12"):
        gpt(heads=5)


def test_gpt_refuses_more_tokens_than_it_has_positions_for():
    with pytest.raises(ExperimentError, match=r"model\.context_length: is 8, but a sample has 9 tokens"):
        gpt()(torch.randint(16, (1, 9)))
