"""Write tests/PROMISES.md from the lines `# promise: ...` at the top of the test files.

    python tests/promises.py > tests/PROMISES.md

Tests in `unit` and `system` are `make test`, those in `slow` are `make test-slow`.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parent
LINE = re.compile(r"^# promise: (.+)$", re.MULTILINE)
HEAD = """\
# Promises and the tests that hold them

`make schema` writes this page from the lines `# promise: ...` at the top of the test files. [README.md](README.md)
explains the tiers, which are the folders.

| promise | tests |
|---|---|"""


def page() -> str:
    """Return the page in Markdown."""
    files = defaultdict(list)
    for path in sorted(TESTS.glob("*/**/test_*.py")):
        for promise in LINE.findall(path.read_text()):
            files[promise].append(f"`{path.relative_to(TESTS)}`")
    rows = [f"| {promise} | {', '.join(files[promise])} |" for promise in sorted(files, key=str.lower)]
    return "\n".join([HEAD, *rows, ""])


if __name__ == "__main__":
    sys.stdout.write(page())
