"""The faults of `make test-mutation` fit the code as it is: one that fits no longer tests nothing."""

import sys
from pathlib import Path

import pytest

MUTATIONS = Path(__file__).parents[1] / "mutations"


def test_every_fault_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(MUTATIONS))
    from faults import FAULTS
    from run import misfits

    try:
        assert not misfits(FAULTS)
    finally:
        for name in ("faults", "run"):
            sys.modules.pop(name, None)
