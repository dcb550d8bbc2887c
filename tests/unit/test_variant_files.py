"""Variants of a comparison are several files, or one file with several values of its keys."""

from pathlib import Path

import pytest

from pipeline.errors import ExperimentError, UsageError
from pipeline.experiment.load import read_variants

TEXT = """
name: {name}
model: {{_target_: torch.nn.Linear, in_features: 2, out_features: 1}}
data: {{_target_: pipeline.data.digits}}
loss: {{_target_: torch.nn.MSELoss}}
optimizer: {{_target_: torch.optim.SGD, lr: 0.1}}
train: {{epochs: 1, global_batch_size: 8}}
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """Two experiment files."""
    for name in "ab":
        (tmp_path / f"{name}.yaml").write_text(TEXT.format(name=name))
    return str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")


def test_two_files_are_two_variants(files: tuple[str, str]) -> None:
    found = read_variants(files, ["optimizer.lr=0.5"], vary=None)
    assert [description for description, _ in found] == list(files)
    assert [file.experiment.optimizer.arguments["lr"] for _, file in found if file.experiment.optimizer] == [0.5, 0.5]


def test_values_of_keys_are_variants(files: tuple[str, str]) -> None:
    text = "optimizer.lr=0.1,0.05 train.epochs=1,2 optimizer.betas=[1,2],[3,[4,5]] seed=7"
    found = read_variants(files[:1], [], vary=text)
    assert [description for description, _ in found] == [
        "optimizer.lr=0.1, train.epochs=1, optimizer.betas=[1,2]",
        "optimizer.lr=0.05, train.epochs=2, optimizer.betas=[3,[4,5]]",
    ]
    assert [(file.experiment.seed, file.experiment.train.epochs) for _, file in found] == [(7, 1), (7, 2)]


@pytest.mark.parametrize(
    ("number", "vary", "message"),
    [
        (1, None,
         "compare takes at least two experiment files, or --vary, .* Did you mean: pipeline benchmark .*a.yaml"),
        (2, "optimizer.lr=1,2", "--vary varies one experiment file, and 2 are named"),
        (1, "optimizer.lr=1,2 train.epochs=1,2,3", "optimizer.lr has 2 values, train.epochs has 3 values"),
        (1, "optimizer.lr=1", "optimizer.lr has 1 value. Give each key the same number of values"),
        (1, "optimizer.lr", "--vary optimizer.lr: write key=value,value"),
        (1, "", "--vary: no key"),
        (1, "train.epochs='1,2", "No closing quotation"),
        (1, "train.epochs=1,2 train.epochs=3", "train.epochs is named twice"),
        (1, "train.epochs=1,", "write key=value,value"),
    ],
)  # fmt: skip
def test_what_makes_no_variants_is_refused(files: tuple[str, str], number: int, vary: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_variants(files[:number], [], vary=vary)


def test_a_wrong_value_is_an_error_of_its_key_and_a_file_is_named_once(files: tuple[str, str]) -> None:
    with pytest.raises(ExperimentError, match=r"train.epochs=-1: train.epochs: "):
        read_variants(files[:1], [], vary="train.epochs=1,-1")
    with pytest.raises(UsageError, match="is named twice"):
        read_variants([files[0], files[0]], [], vary=None)
