"""A damaged answers file: an update says what is wrong with it, and changes nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
from damage import examples
from baking import bake, git
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.errors import UsageError
from pipeline.commands.new.update import update

METADATA = ".cruft.json"
odd = st.none() | st.booleans() | st.integers() | st.just([]) | st.just({}) | st.text(max_size=5)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bake(tmp_path_factory.mktemp("answers") / "mine").folder


@settings(deadline=None, max_examples=examples(150), suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_answers_of_another_type(project: Path, data: st.DataObject) -> None:
    whole = (project / METADATA).read_bytes()
    state: Any = json.loads(git(project, "show", f"HEAD:{METADATA}"))
    place = data.draw(st.sampled_from([state, state["context"], *[state["context"]["cookiecutter"]] * 4]))
    place[data.draw(st.sampled_from(sorted({*place} - {"template", "commit", "checkout", "skip"})))] = data.draw(odd)
    refuses(project, json.dumps(state).encode(), whole)


@settings(deadline=None, max_examples=examples(100), suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_bytes_missing_or_changed(project: Path, data: st.DataObject) -> None:
    whole = (project / METADATA).read_bytes()
    content = bytearray(whole)
    start = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[start : start + data.draw(st.integers(1, 50))]
    else:
        content[start] ^= 1 << data.draw(st.integers(0, 7))
    refuses(project, bytes(content), whole)


@pytest.mark.parametrize("content", [b"", b"\xff", b"[" * 100_000, b"null", b"[]", b'{"directory": "x"}'], ids=range(6))
def test_no_answers_at_all(project: Path, content: bytes) -> None:
    refuses(project, content, (project / METADATA).read_bytes())


def refuses(project: Path, content: bytes, whole: bytes) -> None:
    """If for nothing else, then because git sees the change."""
    (project / METADATA).write_bytes(content)
    before = files(project)
    try:
        with pytest.raises(UsageError) as caught:
            update(project, [])
        assert str(caught.value).strip()
        assert files(project) == before
    finally:
        (project / METADATA).write_bytes(whole)


def files(project: Path) -> dict[Path, int]:
    """All but git's own, which notes that it has looked."""
    return {path: path.stat().st_mtime_ns for path in project.rglob("*") if ".git" not in path.parts}
