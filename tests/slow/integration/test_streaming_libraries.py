"""The data functions of examples/streams for libraries that stream: alike at one and two workers, and resumed."""

import gc
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import Ranks
from same_on_ranks import Compared, Row

EXAMPLE = Path(__file__).parents[3] / "examples" / "streams"
SAMPLES = {"train": 22, "validation": 10}
MLP = {"_target_": "pipeline.models.MLP", "in_features": 12, "hidden": [4], "num_classes": 3}


def write_rows(folder: Path) -> None:
    """Write JSON lines, of which the docs' function holds the first ten out."""
    generator = np.random.default_rng(0)
    lines = [json.dumps({"x": generator.normal(size=3).tolist(), "y": float(i)}) for i in range(32)]
    (folder / "data" / "all.jsonl").write_text("\n".join(lines))


def write_pictures(folder: Path) -> None:
    import webdataset

    generator = np.random.default_rng(0)
    for part, count in SAMPLES.items():
        with webdataset.ShardWriter(f"{folder}/data/{part}-%06d.tar", maxcount=11, verbose=0) as writer:
            for i in range(count):
                picture = generator.integers(255, size=(2, 2, 3), dtype=np.uint8)
                writer.write({"__key__": f"{i:06d}", "png": picture, "cls": i % 3})


def write_chunks(folder: Path) -> None:
    import litdata

    handler = signal.getsignal(signal.SIGINT)
    for part, count in SAMPLES.items():
        litdata.optimize(
            chunk, list(range(count)), str(folder / "data" / part), chunk_size=5, num_workers=1, verbose=False
        )
    signal.signal(signal.SIGINT, handler)  # LitData leaves its own behind, and a variable
    os.environ.pop("DATA_OPTIMIZER_NUM_WORKERS", None)


def chunk(index: int) -> tuple[np.ndarray, int]:
    """Return a sample to write."""
    return np.random.default_rng(index).normal(size=12).astype(np.float32), index % 3


@pytest.mark.filterwarnings("ignore:Exception ignored in.*FileIO:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed file.*tar:ResourceWarning")  # WebDataset closes none
@pytest.mark.parametrize(
    ("package", "function", "write", "sections"),
    [
        ("datasets", "rows", write_rows, {"loader": {"collate": {"_target_": "toy_streams.collated"}}}),
        ("webdataset", "pictures", write_pictures, {"model": MLP, "loss": {"_target_": "torch.nn.CrossEntropyLoss"}}),
        ("litdata", "chunks", write_chunks, {"model": MLP, "loss": {"_target_": "torch.nn.CrossEntropyLoss"}}),
    ],
)
def test_the_example_trains_alike_at_two_workers_and_resumed(
    package: str,
    function: str,
    write: Callable[[Path], None],
    sections: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps 1 to 9 read 22 samples three times, and so three orders."""
    pytest.importorskip(package)
    (tmp_path / "data").mkdir()
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLE)
    case = {
        "data": {"_target_": "toy_streams.of_module", "module": "streams", "name": function},
        "train": {"epochs": None, "steps": 9, "global_batch_size": 8},
        **sections,
    }
    with Ranks(2) as ranks:
        compared = Compared(Row(case, stopped=4), tmp_path / "runs", ranks)
    losses = [value for (name, _), value in compared.alone.series.items() if name == "train/loss"]
    assert len(set(losses)) == 9
    compared.check_all()
    gc.collect()  # a stream that is left early closes its files and threads when it is freed
