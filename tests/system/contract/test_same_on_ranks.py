"""One table: the same training at 1 and 2 workers, in two micro-batches, and resumed by more, fewer or as many."""

# promise: iterable datasets: indexed samples in this order, 1 and 2 workers, resumed by state or by reading again
# promise: logs and losses of an evaluation are means; each metric is that of all samples
# promise: fine-tuning: initial weights, frozen parameters, parameter groups, losses of the model itself
# promise: logs of a task, early stopping, evaluation within epochs, a finished run continued
# promise: resumed after any step, with each strategy, optimizer, scheduler; with a different number of workers
# promise: which samples form a batch depends on seed and step; each validation sample counts once
# promise: orders of one's own, and a batch by worker: the same at 1 and 2 workers and resumed within an epoch
# promise: losses over the whole global batch, at 1 and 2 workers and resumed; refused where there is none
# promise: `evaluate`: a checkpoint's values are the training's, at any world size; the run keeps status and duration
# promise: the best weights are the result; a test set is evaluated once with them

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from rank_rows import ROWS
from ranks import Ranks
from same_on_ranks import COMPARISONS, Compared, Row, train_row

from pipeline.protocol.trial import Rank

PAIRS = [(name, comparison) for name, row in ROWS.items() for comparison in COMPARISONS if row.has(comparison)]


@pytest.fixture(scope="module")
def compared(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Compared]:
    """Trainings of a row."""
    return cache(lambda name: Compared(ROWS[name], tmp_path_factory.mktemp("row"), ranks))


@pytest.mark.parametrize(("name", "comparison"), PAIRS, ids=[" - ".join(pair) for pair in PAIRS])
def test_it_trains_the_same(compared: Callable[[str], Compared], name: str, comparison: str) -> None:
    compared(name).check(comparison)


def test_rows_are_what_they_are_named_for(compared: Callable[[str], Compared]) -> None:
    """Equal results would mean little if a feature did nothing."""
    early, best = (compared(name).alone for name in ("early stopping", "best weights, ddp"))
    assert early.end[0] < 60
    assert early.end[1].startswith("validation/loss has not improved from")
    assert 0 < best.end[2] < best.end[0]
    assert best.metrics.keys() >= {"test/loss", "validation/loss"}
    assert "validation/parts" in compared("metrics of 11 samples").alone.metrics
    trained = {name for name, _ in compared("metrics of training steps").alone.series}
    assert {"train/auroc", "train/confusion_true_0_predicted_1", "validation/auroc"} <= trained
    assert {"train/loss", "train/gradient_norm"} <= {name for name, _ in compared("gathered: both").alone.series}


def test_a_process_that_trains_alone_beside_others_gathers_from_none(
    ranks: Ranks, compared: Callable[[str], Compared], tmp_path: Path
) -> None:
    """As a baseline does on rank 0."""
    beside, _ = ranks.call(_train_beside, ROWS["gathered: both"], tmp_path / "beside")
    assert beside == compared("gathered: both").alone.series


def _train_beside(rank: Rank, row: Row, folder: Path) -> object:
    return train_row(Rank(), row, folder).series if rank.is_first else None
