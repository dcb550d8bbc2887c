"""What several ranks save and resume: sharded parameters, one copy for each node, another number of ranks."""

# promise: resumed after any step, with each strategy, optimizer, scheduler; with a different number of workers

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from checkpointed import EVERY, STEPS, assert_equal, until
from ranks import Ranks

from pipeline.errors import ExperimentError, TrainingError
from pipeline.experiment.train import StartFrom
from pipeline.protocol.trial import Rank, Weights
from pipeline.train import storage as storage_module
from pipeline.train.run import train
from pipeline.train.saved_state import STATE, read
from pipeline.train.storage import Storage, entries, folder_name, verify
from pipeline.train.weights import fit

AFTER = 2
SECTIONS: dict[str, Any] = {
    **EVERY,
    "model": {"_target_": "toys.Branches", "width": 4},
    "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.01},
    "scheduler": {
        "_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": 0.05, "total_steps": "${total_steps}",
    },
    "train": {"clip_grad_norm": 0.5},
}  # fmt: skip
"""With batch statistics and dropout, which depend on the ranks."""
DIVISIBLE: dict[str, Any] = {**SECTIONS, "model": {"_target_": "toys.wide_net"}, "loss": {"_target_": "toys.Uncertain"}}
DIVISIBLE["optimizer"] = {"_target_": "torch.optim.AdamW", "lr": 1e-4}
DIVISIBLE["scheduler"] = {**SECTIONS["scheduler"], "max_lr": 1e-3}
"""A training that doesn't depend on the ranks, with a learned part of the loss."""


class Reached(dict[str, Any]):
    """Losses by step and weights that a training has reached."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[..., list[Any]]]:
    """Calls a function on so many ranks, whose processes serve all tests."""
    with Ranks(2) as two, Ranks(3) as three:
        yield lambda count, *call: {2: two, 3: three}[count].call(*call) if count > 1 else [call[0](Rank(), *call[1:])]


def go(rank: Rank, folder: Path, strategy: str, sections: dict[str, Any], resume: bool = False) -> Reached:
    """Train on a rank; return the losses, norms and validation by step, and the weights, of rank 0."""
    outbox, strategy = toys.Kept(), strategy if rank.world_size > 1 else "single"
    how = {"strategy": strategy, "workers": rank.world_size, "checkpoints": str(folder), "resume": resume}
    train(toys.trial(**sections, **how), rank=rank, outbox=outbox)
    names = ("train/loss", "train/gradient_norm", "train/learning_rate", "validation/loss")
    assert rank.is_first or not outbox.events
    return Reached(
        saved=outbox.saved, resumed=outbox.resumed, weights=outbox.files.get("model/weights.pt"),
        **{name: {point.step: point.value for point in outbox.points(name)} for name in names},
    )  # fmt: skip


def check(found: Reached, expected: Reached, *, after: int, tolerance: float) -> None:
    for name in ("train/loss", "train/gradient_norm", "train/learning_rate", "validation/loss"):
        left = {step: value for step, value in expected[name].items() if step > after}
        assert left
        assert {step: found[name].get(step) for step in left} == pytest.approx(left, rel=tolerance, abs=tolerance), name
    assert found["weights"].keys() == expected["weights"].keys()
    for name, own in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], own, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_as_many_ranks_go_on_to_the_bit(ranks: Callable[..., list[Any]], tmp_path: Path, strategy: str) -> None:
    """Three are the least whose sums depend on the order of adding; two are in test_same_on_ranks.py."""
    whole = ranks(3, go, tmp_path / "whole", strategy, SECTIONS)[0]
    assert whole["saved"] == list(range(1, STEPS + 1))
    until(AFTER, folder=tmp_path / "whole", to=tmp_path / "again")
    again = ranks(3, go, tmp_path / "again", strategy, SECTIONS, True)[0]

    assert again["resumed"] == [AFTER]
    check(again, whole, after=AFTER, tolerance=0)
    states = [read(tmp_path / side / folder_name(STEPS), fills=True) for side in ("whole", "again")]
    for state in states:
        assert state.pop("meter")  # has times
    assert_equal(*states)


@pytest.mark.parametrize(
    ("before", "after"),
    [((2, "ddp"), (1, "single")), ((1, "single"), (2, "fsdp")), ((2, "fsdp"), (3, "ddp")), ((3, "fsdp"), (2, "fsdp"))],
    ids=str,
)
def test_other_ranks_go_on_to_rounding(
    ranks: Callable[..., list[Any]], tmp_path: Path, before: tuple[int, str], after: tuple[int, str]
) -> None:
    alone = ranks(1, go, tmp_path / "alone", "single", DIVISIBLE)[0]
    ranks(before[0], go, tmp_path / "whole", before[1], DIVISIBLE)
    until(AFTER, folder=tmp_path / "whole", to=tmp_path / "again")
    again = ranks(after[0], go, tmp_path / "again", after[1], DIVISIBLE, True)[0]

    assert again["resumed"] == [AFTER]
    check(again, alone, after=AFTER, tolerance=1e-12)


def test_shards_are_files_that_another_training_starts_from(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    whole = ranks(2, go, tmp_path, "fsdp", DIVISIBLE)[0]
    storage = Storage(str(tmp_path))
    newest = entries(storage)[0]
    assert newest.manifest is not None
    assert verify(storage, newest) is None
    assert sorted(file.name[:12] for file in newest.manifest.files) == ["shard-00001-", "shard-00002-", STATE]

    s = toys.built(**DIVISIBLE)
    start = Weights(path=storage.address, checkpoint=newest.name, source="run x, the checkpoint of step 6")
    assert fit(s.model, StartFrom(run="x"), start).taken.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert_equal(
        {name.removeprefix("model."): one for name, one in read(tmp_path / newest.name, fills=True)["model"].items()},
        {name: one for name, one in whole["weights"].items() if not name.startswith("task.")},
    )


def _resume_from_afar(rank: Rank, folder: Path, elsewhere: Path | None = None) -> tuple[list[Path], str]:
    """Resume from copies as of an object storage; return the copies that this rank has made, and its error.

    ``elsewhere`` is what rank 1 finds at the address of the checkpoints: it is on a node of its own.
    """
    copies, error, real = list[Path](), "", Storage.fetched

    @contextmanager
    def fetch(storage: Storage, name: str) -> Iterator[Path]:
        with real(storage, name) as copy:
            copies.append(copy)
            yield copy if elsewhere is None or rank.is_first else elsewhere / name

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Storage, "fetched", fetch)
        patch.setattr(storage_module, "LocalFileSystem", type(None))
        if elsewhere is not None:
            rank = rank.model_copy(update={"local_rank": 0, "node": f"node{rank.rank}"})
        try:
            assert go(rank, folder, "fsdp", DIVISIBLE, True)["resumed"] == ([AFTER] if rank.is_first else [])
        except TrainingError as failed:
            error = str(failed)
    return copies, error


def test_a_checkpoint_is_fetched_once_for_the_ranks_of_a_node(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    ranks(2, go, tmp_path / "whole", "fsdp", DIVISIBLE)
    until(AFTER, folder=tmp_path / "whole", to=tmp_path / "again")
    (first, error), other = ranks(2, _resume_from_afar, tmp_path / "again")
    assert (len(first), error, other) == (1, "", ([], ""))
    assert not any(folder.exists() for folder in first)


def test_a_rank_that_does_not_reach_the_checkpoints_ends_all(tmp_path: Path) -> None:
    with Ranks(2) as two:
        two.call(go, tmp_path / "whole", "fsdp", DIVISIBLE)
        until(AFTER, folder=tmp_path / "whole", to=tmp_path / "again")
        (_, first), (_, second) = two.call(_resume_from_afar, tmp_path / "again", tmp_path / "empty")
    assert "can't be read by rank 1 on node1, and all must reach them: FileNotFoundError" in second
    assert first == second


def _go_alone(rank: Rank, folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if not rank.is_first:
            patch.setattr(Path, "is_dir", lambda _: False)
            rank = rank.model_copy(update={"node": "node1"})
        with pytest.raises(ExperimentError) as refused:
            go(rank, folder, "ddp", DIVISIBLE)
    return str(refused.value)


def test_a_folder_that_a_node_does_not_share_is_refused_before_training(tmp_path: Path) -> None:
    with Ranks(2) as two:
        first, second = two.call(_go_alone, tmp_path)
    assert first == second
    assert f"checkpoint.directory: {tmp_path} is on " in first
    assert "but not on node1. Set it to a folder that all nodes share" in first


def test_a_storage_that_is_unknown_is_told_before_training(command: Callable[..., Any]) -> None:
    ended = command("run", "lab.yaml", "checkpoint.directory=s4://bucket/x")

    assert ended.code == 2
    assert "checkpoint.directory: s4://bucket/x: Protocol not known: s4" in ended.stderr
