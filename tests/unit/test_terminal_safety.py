"""Whatever a command prints passes one place that removes control characters: foreign texts do not steer a terminal."""

# promise: no control character of an exception or of a foreign run folder reaches the terminal

import io
import re
from pathlib import Path

import pytest
from rich.progress import Progress

from pipeline.commands.options import print_json, say, show
from pipeline.errors import TrainingError
from pipeline.record.screen import OptionalConsole, linked, write

PACKAGE = Path(__file__).parents[2] / "pipeline"
FOREIGN = "bad \x1b]0;PWNED\x07\x1b[31mred\x9b2J\ttab\r"
CLEAN = "bad ]0;PWNED[31mred2J\ttab"


def test_a_console_prints_only_escapes_of_its_own() -> None:
    console = OptionalConsole(file=io.StringIO(), width=200, force_terminal=True, color_system="standard")
    write(console, FOREIGN, style="red")
    console.print(linked(f"see http://a/{FOREIGN}"), soft_wrap=True)
    with Progress(console=console) as bars:
        bars.add_task(FOREIGN, total=1)
    assert isinstance(console.file, io.StringIO)
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]|\x1b\]8;[^\x1b]*\x1b\\", "", console.file.getvalue())
    assert "PWNED[31mred2J" in text
    assert re.findall(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", text) == []


def test_messages_errors_and_documents_have_none(capsys: pytest.CaptureFixture[str]) -> None:
    say(FOREIGN)
    show(TrainingError(FOREIGN, f"Traceback\n{FOREIGN}"))
    print_json('{"error": "\x9b31m"}')
    out, err = capsys.readouterr()
    assert out == f"{CLEAN.expandtabs()}\n" + '{"error": "\\u009b31m"}\n'
    assert "\x1b" not in err
    assert err.count("PWNED[31mred2J") == 2


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("commands/*.py")), ids=lambda path: path.stem)
def test_a_command_prints_by_the_shared_functions_alone(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = re.findall(r"typer\.echo\(|sys\.std\w+\.write\(|[^.\w]print\(|rich\.console\.Console\((?!file=)", text)
    assert found == (["typer.echo("] if path.stem == "options" else [])
