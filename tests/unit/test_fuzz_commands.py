"""Broken command lines, by the hundred, through the real command: exit code 2 or 3, a sentence, nothing written."""

# promise: no file, command line or journal ends in a traceback

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import Ended
from damage import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_fuzz_experiments import broken_bytes, broken_trees, overrides, written

SHARED = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],  # the command cleans up itself
)
FILES = [
    "broken.yaml", "binary", "empty", "good.yaml", "nowhere/x.yaml", "folder", ".", "", "\x00", "x" * 300,
    "/dev/null",
]  # fmt: skip
FILES += ["runs/20260101-a", "good.yaml/x", "/dev/zero", "~", "*.yaml", "é.yaml"]
words = st.sampled_from(
    [
        *(
            "--json", "--quiet", "-q", "--verbose", "--no-baseline", "--nope", "-x", "--", "-", "=", "--help=1",
            "--workers",
        ),
        *(
            "--workers=0", "--workers=-1", "--workers=99999999999999999999", "--workers=1,2", "--workers=a",
            "--workers=", "--workers=٣",
        ),
        *(
            "--strategies=", "--strategies=ddpp", "--strategies=,", "--repeats=0", "--repeats=x", "--max=0",
        ),
        *(
            "--link=", "--link=1", "--link=1Gbit,", "--link=0Gbit,1us", "--link=1e999Gbit,1us", "--link=infGbit,1us",
            "--link=-1Gbit,2s",
        ),
        *(
            "--address=", "--address=x", "--address=://", "--address=h:99999999", "--address=\x00",
            "--directory=nowhere",
        ),
        *("--directory=good.yaml", "--directory=\x00", "--resume=", "--resume=x", "--resume=latest", "--allow-changed"),
        *(
            "--set", "--set=x", "--set==", "--set=data=x", "--set=project_name=", "--set=project_name=../x",
            "--no-input",
        ),
        *(
            "--slurm", "--nodes=0", "--nodes=2", "--env=", "--env=A=B",
        ),
        *(
            "--to=",
            "--to=good.yaml",
            "--to=\x00",
            f"--to={'a' * 300}",
            f"--directory={'a' * 300}",
            "--checkpoint=",
            "--checkpoint=-1",
            "--onnx",
        ),
        *("--launcher=é", "latest", "ddp-project", "dp-prototype", "nope", "\udc80", "a" * 300),
    ]
)  # fmt: skip
# What they do with a good file takes long or starts servers: here they get none.
WITH_FILE = ["check --no-data", "run", "run --dry-run", "benchmark"]
OTHERS = ["list", "show", "compare", "sync", "new", "schema", "evaluate", "export", "nope"]
OTHERS += ["export --to=out", ""]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any) -> Path:
    """Where the commands run: as a user's folder may look on a bad day."""
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    shutil.copy(Path(__file__).parents[1] / "project" / "lab.yaml", "good.yaml")
    Path("binary").write_bytes(bytes(range(256)) * 40)
    Path("empty").touch()
    Path("folder").mkdir()
    Path("broken.yaml").write_text("name: [\n")
    return place


def there(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in folder.parent.rglob("*")}


def check_ended(ended: Ended, arguments: list[str]) -> None:
    assert ended.code in (0, 1, 2, 3), arguments
    assert "Traceback" not in ended.output, arguments
    assert ended.code == 0 or ended.output.strip(), arguments


@settings(SHARED, max_examples=examples(150))
@given(st.sampled_from(WITH_FILE), broken_bytes() | broken_trees().map(written), st.lists(overrides, max_size=2))
def test_broken_files(folder: Path, command: Callable[..., Ended], name: str, content: bytes, more: list[str]) -> None:
    more = [] if name.startswith("check") else [*more, "tracking=nowhere"]  # wrong in any case, so that nothing starts
    Path("broken.yaml").write_bytes(content)
    before = there(folder)

    ended = command(*name.split(), "broken.yaml", *(word for word in more if not word.startswith("-")))

    check_ended(ended, more)
    assert ended.code == 2 or (name.startswith("check") and ended.code == 0), "what was changed may have been a comment"
    assert there(folder) == before


@settings(SHARED, max_examples=examples(150))
@given(st.sampled_from([*WITH_FILE, *OTHERS]), st.sampled_from(FILES), st.lists(words, max_size=3))
def test_broken_command_lines(
    folder: Path, command: Callable[..., Ended], name: str, file: str, more: list[str]
) -> None:
    if name in WITH_FILE and file == "good.yaml":
        file = "broken.yaml"
    before = there(folder)

    ended = command(*name.split(), file, *more)

    check_ended(ended, more)
    if name.partition(" ")[0] != "new":
        assert there(folder) == before
