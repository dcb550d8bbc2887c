"""The model takes what the data gives and returns what the loss takes."""

import torch
from conftest import Built


def test_shape(built: Built) -> None:
    inputs, targets = built.batch()
    outputs = built.model(inputs)

    assert outputs.shape == (*targets.shape, built.experiment.metrics["accuracy"].arguments["num_classes"])
    assert torch.isfinite(outputs).all()


def test_every_parameter_learns(built: Built) -> None:
    """DDP waits for the gradient of each parameter; one that isn't used needs `find_unused_parameters`."""
    inputs, targets = built.batch()
    logits = built.model(inputs).flatten(0, -2)
    loss = torch.nn.functional.cross_entropy(logits, targets.flatten())
    names, parameters = zip(*built.model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)

    assert [name for name, gradient in zip(names, gradients, strict=True) if gradient is None] == []


def test_a_sample_does_not_depend_on_its_batch(built: Built) -> None:
    """So the model trains the same however a batch is shared among workers. Batch normalization breaks it."""
    inputs, _ = built.batch()
    with torch.no_grad():
        together, alone = built.model(inputs), built.model(inputs[:1])

    torch.testing.assert_close(together[:1], alone, rtol=1e-4, atol=1e-5)
