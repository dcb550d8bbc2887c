"""Strategies and launchers by name, built in or from other distributions."""

from pathlib import Path

import pytest

from pipeline import registry


def install(folder: Path) -> None:
    """Install another distribution with a strategy of its own, as pip does."""
    (folder / "their_strategy.py").write_text("class Strategy: ...")
    info = folder / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pipeline.strategies]\nsharded = their_strategy\nddp = their_strategy\n")


def test_each_file_is_a_name() -> None:
    assert registry.names("strategies") == ("ddp", "dp", "fsdp", "single")
    assert registry.names("launchers") == ("inprocess", "ray", "torchrun")
    assert registry.load("strategies", "dp").Strategy.devices == "all"
    assert registry.load("launchers", "inprocess").Launcher.many_processes is False
    for unknown in ("base", "nothing"):
        with pytest.raises(KeyError):
            registry.load("strategies", unknown)


def test_other_distributions_add_theirs_but_take_no_built_in_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "sharded" not in registry.names("strategies")
    install(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert registry.names("strategies") == ("ddp", "dp", "fsdp", "sharded", "single")
    assert registry.load("strategies", "sharded").__name__ == "their_strategy"
    assert registry.load("strategies", "ddp").__name__ == "pipeline.strategies.ddp"
