"""A folder that tests pipeline on a GPU machine without a network: wheels beside torch, the sources, and a script.

    python benchmarks/gpu_bundle.py build/gpu-bundle                  # for Python 3.12 on Linux, x86-64
    python benchmarks/gpu_bundle.py build/gpu-bundle --python 3.11

Needs pip and, to download the wheels, its index. The versions are those of constraints.txt. Ray is left out: its wheel
alone is larger than the bundle may be. Its test runs where the machine has Ray, and is skipped elsewhere.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
NEEDED = (
    "pydantic",
    "omegaconf",
    "pyyaml",
    "rich",
    "typer",
    "torchmetrics",
    "safetensors",
    "psutil",
    "fsspec",
    "nvidia-ml-py",
    "numpy",
    "threadpoolctl",
    "pytest",
    "pytest-timeout",
    "hypothesis",
)
"""Imports of tests/slow/gpu and benchmarks/gpu.py, without torch and its own dependencies."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
PROJECT = ("pyproject.toml", "README.md", "LICENSE", "pipeline", "templates")
"""Sources of the project's own wheel."""
SOURCES = (
    "pyproject.toml",
    "tests/slow/gpu",
    "tests/support",
    *(f"benchmarks/{name}.py" for name in ("gpu", "gpu_page", "gpu_work")),
)
"""Files that the bundle has beside the wheels."""
MOST_MB = 60
SCRIPT = """\
#!/bin/sh
# Test pipeline on this machine: sh run-gpu-bundle.sh tests|bench|all [RESULTS] [OPTIONS OF benchmarks/gpu.py]
# Needs Python @PYTHON@ with torch. No network: what else is needed is in wheels/. PYTHON=... names the interpreter.
# GPU_REHEARSAL=1 runs the tests on the CPU, as far as possible, to see whether this folder has all that they need.
set -eu
case "${1:-}" in tests|bench|all) what=$1 ;; *) sed -n '2,4s/^# //p' "$0" >&2; exit 2 ;; esac
kit=$(cd "$(dirname "$0")" && pwd)
results=${2:-results}
[ $# -lt 2 ] && shift || shift 2
mkdir -p "$results"
results=$(cd "$results" && pwd)
python=${PYTHON:-python@PYTHON@}
venv=$kit/venv
if [ ! -e "$venv/.ready" ]; then
  "$python" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "@PYTHON@")' || {
    echo "$python is not Python @PYTHON@, which the wheels are for" >&2; exit 3; }
  "$python" -c 'import torch' || { echo "$python has no torch, which the bundle leaves to the machine" >&2; exit 3; }
  "$python" -m venv --system-site-packages "$venv"
  # A virtual environment that is the base itself is not seen by the new one's system site packages.
  "$python" -c 'import site; print("\\n".join(site.getsitepackages()))' > \\
    "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of-the-machine.pth"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --ignore-installed \\
    --find-links "$kit/wheels" --requirement "$kit/requirements.txt"
  touch "$venv/.ready"
fi
cd "$kit/source"
"$venv/bin/python" -c 'import torch
print("torch", torch.__version__, "CUDA", torch.version.cuda, torch.cuda.is_available())'
case $what in
  tests) exec "$venv/bin/python" -m pytest --noconftest -o filterwarnings=default -m gpu -p no:cacheprovider \\
    --junitxml="$results/gpu-tests.xml" tests/slow/gpu "$@" ;;
  bench) exec "$venv/bin/python" benchmarks/gpu.py --out "$results" "$@" ;;
  all) exec "$venv/bin/python" benchmarks/gpu.py --tests --out "$results" "$@" ;;
esac
"""


def main() -> int:
    """Write the folder, and say what is in it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of Python on the GPU machine")
    given = parser.parse_args()
    shutil.rmtree(given.folder, ignore_errors=True)
    wheels = given.folder / "wheels"
    wheels.mkdir(parents=True)
    pinned = [f"{name}=={metadata.version(name)}" for name in closure(NEEDED, python=given.python)]
    download(pinned, to=wheels, python=given.python)
    build(to=wheels)
    (given.folder / "requirements.txt").write_text("\n".join([*pinned, "ddp-pipeline", ""]))
    copy(SOURCES, to=given.folder / "source")
    script = given.folder / "run-gpu-bundle.sh"
    script.write_text(SCRIPT.replace("@PYTHON@", given.python))
    script.chmod(0o755)
    megabytes = sum(path.stat().st_size for path in given.folder.rglob("*") if path.is_file()) / 1e6
    print(f"{given.folder}: {len(list(wheels.iterdir()))} wheels for Python {given.python}, {megabytes:.1f} MB")
    print(f"there: sh {script.name} tests|bench|all [FOLDER FOR RESULTS]")
    if megabytes > MOST_MB:
        print(f"that is more than {MOST_MB} MB", file=sys.stderr)
    return int(megabytes > MOST_MB)


def closure(names: tuple[str, ...], *, python: str) -> list[str]:
    """Return distributions with all that they need, as installed here, sorted; without torch and what only it needs."""
    found: set[str] = set()
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found or name == "torch":
            continue
        found.add(name)
        for text in metadata.requires(name) or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": "", "python_version": python}):
                waiting.append(canonicalize_name(needed.name))
    return sorted(found)


def download(pinned: list[str], *, to: Path, python: str) -> None:
    """Download wheels for the other machine; build those of pure Python that have none.

    Raises:
        subprocess.CalledProcessError: pip can't find one of them.
    """
    about = ["--python-version", python, "--implementation", "cp", *(f"--platform={name}" for name in PLATFORMS)]
    for one in pinned:
        line = ["download", "--only-binary=:all:", *about, "--no-deps", "--dest", to, one]
        if _pip(*line, check=False).returncode:
            _pip("wheel", "--no-deps", "--wheel-dir", to, one)
    if compiled := [wheel.name for wheel in to.iterdir() if not re.search(r"-any\.whl$|manylinux", wheel.name)]:
        raise SystemExit(f"{', '.join(compiled)}: built for this machine; there is no wheel for Python {python}")


def build(*, to: Path) -> None:
    """Build the project's own wheel from a copy, so that nothing is written into the checkout."""
    with tempfile.TemporaryDirectory() as folder:
        copy(PROJECT, to=Path(folder))
        _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", to, folder)


def copy(names: tuple[str, ...], *, to: Path) -> None:
    """Copy files and folders of this checkout."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in names:
        source, target = ROOT / name, to / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=ignored)
        else:
            shutil.copy2(source, target)


def _pip(*arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[bytes]:
    line = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, arguments)]
    return subprocess.run(line, check=check, stderr=None if check else subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
