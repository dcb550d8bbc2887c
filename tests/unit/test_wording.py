"""Numbers and amounts as messages show them."""

import math
from pathlib import Path

import pytest

from pipeline.protocol.events import ArtifactSaved, ModelSaved
from pipeline.tracking.store import TrackingOutcome
from pipeline.wording import counted, figure, nearest


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (18468.3, "18,470"),
        (9999.7, "10,000"),
        (-1234567.0, "-1,235,000"),
        (5890.0, "5,890"),
        (690.04, "690"),
        (0.03347, "0.03347"),
        (0.5, "0.5"),
        (0.0, "0"),
        (3e-05, "3e-05"),
        (2.5e16, "2.5e+16"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_figures_have_four_digits_and_no_exponent_that_a_reader_would_have_to_count(value: float, text: str) -> None:
    assert figure(value) == text


def test_a_wrong_letter_is_as_likely_as_a_missing_one() -> None:
    names = {"dpp": "ddp", "fdp": "fsdp", "Ddp": "ddp", "gpu": None}
    assert {word: nearest(word, ("ddp", "dp", "fsdp", "cpu"), cutoff=0.7) for word in names} == names


def test_counts_go_with_their_noun() -> None:
    assert [counted(number, "event") for number in (0, 1, 1200)] == ["0 events", "1 event", "1200 events"]
    assert counted(1200, "event", spec=",") == "1,200 events"


def test_what_mlflow_lacks_is_counted(tmp_path: Path) -> None:
    sent, path = TrackingOutcome(), tmp_path / "events.jsonl"
    assert sent.waiting(tmp_path) == ""
    path.write_bytes(b"{}\n" * 13)
    sent.offset = 3
    assert sent.waiting(tmp_path) == "12 events"
    sent.uploads += [ArtifactSaved(path="report.html"), ModelSaved(weights="model/weights.pt")]
    assert sent.waiting(tmp_path) == "12 events and 2 files"
    sent.uploads.pop(0)
    sent.offset = 39
    assert sent.waiting(tmp_path) == "1 file"
