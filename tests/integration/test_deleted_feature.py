"""Whoever deletes a feature's file and its two lines in the list has deleted the feature."""

# promise: the core does not know its features

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_trainings_do_without_a_feature_that_is_deleted(tmp_path: Path) -> None:
    for name in ("pipeline", "tests/unit", "tests/support"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "tests/conftest.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    features = tmp_path / "pipeline" / "training" / "features"
    (features / "averaging.py").unlink()
    listed = features / "__init__.py"
    text, count = re.subn(r"^.*\bAveraging\b.*\n", "", listed.read_text(), flags=re.MULTILINE)
    assert count == 2
    listed.write_text(text)
    files = ("test_training", "test_feature_pairs", "test_early_stopping", "test_own_features")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not averages"]
    done = subprocess.run(
        [*command, *(f"tests/unit/{name}.py" for name in files)],
        cwd=tmp_path, env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
