"""What fuzz tests do to good files, and how often."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

INDENTS = [b" ", b"  ", b"\t", b"- "]


def examples(count: int) -> int:
    """A fifth of them in `make test`, always the same; all of them, and others each time, in `make test-fuzz`."""
    return count if os.environ.get("HYPOTHESIS_PROFILE") else max(20, count // 5)


def damaged(
    draw: st.DrawFn, whole: bytes, *, kinds: Sequence[str], snippets: Sequence[bytes], most: int, longest: int
) -> bytes:
    """Bytes with a few damages.

    Args:
        draw: Hypothesis' choice.
        whole: what is damaged.
        kinds: what may happen: insert or replace (by a snippet), flip, cut, repeat, indent, end or start (is missing).
        snippets: what is put in.
        most: damages.
        longest: bytes that one of them takes.
    """
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, most))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.integers(0, longest)))
        match draw(st.sampled_from(kinds)):
            case "insert":
                content[start:start] = draw(st.sampled_from(snippets))
            case "replace":
                content[start:end] = draw(st.sampled_from(snippets))
            case "flip" if start < len(content):
                content[start] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del content[start:end]
            case "repeat":
                content[start:start] = content[start:end]
            case "indent":
                line = content.rfind(b"\n", 0, start) + 1
                content[line:line] = draw(st.sampled_from(INDENTS))
            case "end":
                del content[start:]
            case "start":
                del content[:start]
    return bytes(content)


def places_in(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value."""
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    for name, inner in items:
        yield (*path, name)
        yield from places_in(inner, (*path, name))
