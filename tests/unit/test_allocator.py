"""What a step frees is there for the next one."""

import os
import platform

import pytest

from pipeline import system

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")


def test_a_user_may_refuse_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    with system.huge_pages():
        assert os.environ["THP_MEM_ALLOC_ENABLE"] == "0"
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "0"


def test_the_environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    with system.huge_pages():
        assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"
    assert "THP_MEM_ALLOC_ENABLE" not in os.environ
