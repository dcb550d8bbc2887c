"""That the tests of the documentation would see a mistake in it."""

from pathlib import Path

import pytest
import typer
from blocks import blocks
from typed import NotThere, mentioned, parts, understand

from pipeline.errors import ExperimentError, UsageError

ROOT = Path(__file__).parents[2]
WRONG_LINE = typer.BadParameter.__mro__[1]  # typer has click's exceptions, and hands on only some
PAGE = """
<!-- test: run, with train.epochs=1 tracking.log_model=false, exit 2 -->
```bash
pipeline run FILE \\
    train.epochs=2   # twice
make run && pipeline list > runs.txt
```

1. in a list

   ```yaml
   train: {epochs: 3}
   ```

    parallel:
      workers: 2

and

    step-4 could not be saved

```python title="mine/net.py"
import torch
```
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    file = tmp_path / "page.md"
    file.write_text(PAGE)
    return file


def test_blocks_are_found_with_what_is_said_of_them(page: Path, tmp_path: Path) -> None:
    commands, listed, indented, output, python = blocks(page, root=tmp_path)
    assert (commands.is_run, commands.option("exit")) == (True, "2")
    assert commands.option("with") == "train.epochs=1 tracking.log_model=false"
    assert commands.lines == ["pipeline run FILE      train.epochs=2", "make run && pipeline list > runs.txt"]
    assert [part for line in commands.lines for part in parts(line)][1:] == ["make run", "pipeline list"]
    assert (listed.kind, listed.text) == ("yaml", "train: {epochs: 3}")
    assert (indented.kind, indented.place) == ("yaml", "page.md:15")
    assert (output.kind, output.how) == ("output", "")
    assert (python.kind, python.title) == ("python", "mine/net.py")


def test_a_language_that_nobody_tests_is_refused(page: Path, tmp_path: Path) -> None:
    page.write_text("```perl\nprint\n```\n")
    with pytest.raises(ValueError, match=r"page.md:1: nobody knows how to test perl"):
        blocks(page, root=tmp_path)


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("pipeline runn FILE", NotThere),
        ("pipeline benchmark", WRONG_LINE),
        ("pipeline run FILE --resum", WRONG_LINE),
        ("pipeline benchmark FILE --repeats none", WRONG_LINE),
        ("pipeline benchmark FILE --strategies ddpp", UsageError),
        ("pipeline benchmark FILE --workers 1,two", UsageError),
        ("pipeline run experiments/nothing.yaml", UsageError),
        ("pipeline run FILE train.epoch=2", ExperimentError),
        ("make nothing", NotThere),
        ("python benchmarks/nothing.py", NotThere),
    ],
)
def test_a_wrong_command_is_seen(command: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(error):
        understand(command)


@pytest.mark.parametrize("command", ["pipeline runs", "pipeline run --dry", "make nothing", "pipeline --versions"])
def test_a_wrong_command_in_a_sentence_is_seen(command: str) -> None:
    with pytest.raises(NotThere):
        mentioned(command)


def test_a_command_of_nobody_is_not_taken_for_understood() -> None:
    assert not understand("kubectl apply")
