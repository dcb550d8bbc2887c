"""The blocks of code in a page of Markdown: fenced or indented, with what stands around them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["commands", "yaml", "python", "toml", "output"]
COMMANDS = ("pipeline", "make", "python", "pip", "git", "cd", "export", "cookiecutter", "docker", "sudo", "torchrun",
            "accelerate", "source", "ray", "cat", "head", "jupyter")  # fmt: skip
"""What a line begins with that is to be typed into a shell."""
_KINDS: dict[str, Kind] = {
    "bash": "commands",
    "yaml": "yaml",
    "python": "python",
    "toml": "toml",
    "": "output",
    "text": "output",
}
_FENCE = re.compile(r"^( *)```(\w*)(?: +title=\"([^\"]+)\")?\s*$")
_DIRECTIVE = re.compile(r"^<!-- test: (.+) -->$")
_KEY = re.compile(r"^(name|model|data|task|loss|train|parallel|benchmark|checkpoint|tracking|loader|sampler):( |$)")


@dataclass(frozen=True)
class Block:
    """A block of code.

    ``how`` is the comment above it, ``<!-- test: ... -->``, which no reader sees; ``title`` the file that it shows.
    """

    page: str
    line: int
    kind: Kind
    text: str
    title: str = ""
    how: str = ""

    @property
    def place(self) -> str:
        """Such as "docs/index.md:12"."""
        return f"{self.page}:{self.line}"

    @property
    def lines(self) -> list[str]:
        """The commands of a shell block, without comments, those that go on in a second line whole."""
        text = self.text.replace("\\\n", " ")
        return [line for line in (without_comment(line) for line in text.splitlines()) if line]

    @property
    def is_run(self) -> bool:
        """Whether it is executed."""
        return self.how.startswith("run")

    @property
    def is_shown(self) -> bool:
        """Whether the command above it printed exactly this."""
        return self.how.startswith("shown")

    @property
    def is_added(self) -> bool:
        """Whether it is added to the end of its file."""
        return self.how.startswith("adds")

    def option(self, name: str) -> str:
        """What follows a word in the comment, up to a comma; empty without it."""
        found = re.search(rf", {name} ([^,]+)", self.how)
        return found[1].strip() if found else ""


def without_comment(line: str) -> str:
    """A line of shell without what follows a # after a space."""
    return re.sub(r"(^|\s)#.*$", "", line).strip()


def blocks(path: Path, *, root: Path) -> list[Block]:
    """All blocks of a page, from top to bottom."""
    return [_classified(block) for block in _found(path.read_text().splitlines(), str(path.relative_to(root)))]


def _found(lines: list[str], page: str) -> Iterator[Block]:
    n, how = 0, ""
    while n < len(lines):
        if directive := _DIRECTIVE.match(lines[n].strip()):
            how = directive[1]
        elif fence := _FENCE.match(lines[n]):
            end = next(m for m in range(n + 1, len(lines)) if lines[m].strip() == "```")
            text = "\n".join(line.removeprefix(fence[1]) for line in lines[n + 1 : end])
            if fence[2] not in _KINDS:
                raise ValueError(f"{page}:{n + 1}: nobody knows how to test {fence[2]}")
            yield Block(page, n + 1, _KINDS[fence[2]], text, fence[3] or "", how)
            n, how = end, ""
        elif _begins_indented(lines, n):
            end = next((m for m in range(n, len(lines)) if lines[m] and not lines[m].startswith("    ")), len(lines))
            yield Block(page, n + 1, "output", "\n".join(line[4:] for line in lines[n:end]).rstrip(), "", how)
            n, how = end - 1, ""
        elif lines[n].strip():
            how = ""
        n += 1


def _begins_indented(lines: list[str], n: int) -> bool:
    return lines[n].startswith("    ") and n > 0 and not lines[n - 1].strip()


def _classified(block: Block) -> Block:
    """An indented block by what its first line begins with."""
    if block.kind != "output":
        return block
    lines = [without_comment(line) for line in block.text.splitlines()]
    first = next((line for line in lines if line), "")
    kind: Kind = "commands" if first.split(" ")[0] in COMMANDS else "yaml" if _KEY.match(first) else "output"
    return Block(block.page, block.line, kind, block.text, block.title, block.how)


def inline_commands(path: Path) -> list[str]:
    """The commands between backticks in a page's text, and those that an output shows after a $."""
    prose = re.sub(r"(?ms)^ *```.*?^ *```", "", path.read_text())
    shown = re.findall(r"(?m)^ *\$ (pipeline [^\n]+)", path.read_text())
    return [*re.findall(r"`((?:pipeline|make) [^`\n]+)`", prose), *shown]


def code(readme: str) -> list[str]:
    """The blocks of Python in the README of an exported model."""
    return re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
