"""Requirements on the model: it fits the data, and the experiment's loss and metrics."""

import torch
from pipeline import Parts


def test_loss_and_metrics_take_what_the_model_returns(built: Parts) -> None:
    step = built.step(built.batch(range(4)))
    built.metrics.update(step.outputs, step.targets)

    assert torch.isfinite(step.sum)
    assert len(built.metrics.compute()) == len(built.metrics)


def test_every_parameter_learns(built: Parts) -> None:
    """DDP waits for the gradient of each parameter; unused parameters need `find_unused_parameters`."""
    loss = built.step(built.batch(range(4))).sum
    learning = [(name, one) for name, one in built.model.named_parameters() if one.requires_grad]
    names, parameters = zip(*learning, strict=True)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)

    assert [name for name, gradient in zip(names, gradients, strict=True) if gradient is None] == []


def test_a_sample_does_not_depend_on_its_batch(built: Parts) -> None:
    """Then the model trains the same for any number of workers.

    Tested in evaluation mode, because dropout is random; batch norm is not tested by this.
    """
    built.model.eval()
    with torch.no_grad():
        together, alone = (built.step(built.batch(samples)).outputs for samples in (range(4), [0]))

    torch.testing.assert_close(together[: len(alone)], alone, rtol=1e-4, atol=1e-5)
