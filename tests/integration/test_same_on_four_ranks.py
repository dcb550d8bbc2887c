"""Orders, streams and gathered losses: the same training at 1 and 4 workers, also resumed."""

from pathlib import Path
from typing import Any

import pytest
import toy_contrastive
import toy_gans
import toy_orders
from same_on_ranks import Alone


@pytest.mark.parametrize("kind", [toy_orders, toy_contrastive], ids=["orders", "gathered"])
def test_four_workers_reach_the_losses_of_one_and_resume_it(tmp_path: Path, kind: Any) -> None:
    alone = Alone(kind.CASES, tmp_path, stopped=kind.STOPPED)
    alone.on(4)
    for case in getattr(kind, "SAVED_FOR_ALL", ()):
        alone.goes_on_from(4, case)


@pytest.mark.parametrize("workers", [2, 4])
def test_several_optimizers_train_as_in_one_process_and_resume(tmp_path: Path, workers: int) -> None:
    Alone(toy_gans.CASES, tmp_path, stopped=toy_gans.STOPPED).on(workers)
