"""Run tiers of tests one after the other, then say what each took; pytest's sums are the last line.

    python tests/tiers.py lint unit contract

A tier that fails lets the others run. The exit code is 1 if anything failed.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LINT = ("ruff format --check .", "ruff check .", "mypy", "lint-imports")
SPREAD = ["--numprocesses=logical", "--maxschedchunk=8"]
"""Over all cores, test by test."""
GROUPED = ["--numprocesses=3", "--dist=loadfile", "--no-loadscope-reorder"]
"""Three at a time, as processes wait much; tests that share something costly stay together."""
OPTIONS = {
    "unit": ["tests/unit", *SPREAD],
    "contract": ["tests/contract", *GROUPED],
    "replay": ["tests/replay", *GROUPED],
    "journeys": ["tests/journeys", *GROUPED],
    "fuzz": ["tests/unit", "-k=fuzz", *SPREAD],
    "gpu": ["tests/gpu", "-o=filterwarnings=default"],  # as without conftest.py, in the folder of `make gpu-bundle`
}
"""Of pytest, by tier; one that isn't here runs its folder in one process. `fuzz` draws other examples each time."""
VARIABLES = {"fuzz": {"HYPOTHESIS_PROFILE": "default"}, "gpu": {"GPU_REHEARSAL": "1"}}
"""Of the environment, by tier. `gpu` runs on the CPU where there is no GPU, as far as that is possible."""
WORDS = ("failed", "passed", "skipped", "error")


class Tier(NamedTuple):
    """What became of a tier."""

    name: str
    wall_s: float
    cpu_s: float
    counts: Counter[str]
    failures: list[str]


def lint() -> tuple[Counter[str], list[str]]:
    """Run the checks of the code side by side; show what those that fail say."""
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(_check, LINT))
    failures = []
    for line, check in zip(LINT, done, strict=True):
        print(f"{line}: {'ok' if check.returncode == 0 else 'failed'}")
        if check.returncode:
            print(check.stdout)
            failures.append(f"FAILED {line}")
    return Counter(error=len(failures)), failures


def _check(line: str) -> subprocess.CompletedProcess[str]:
    program, *arguments = line.split()
    command = [str(Path(sys.executable).parent / program), *arguments]
    return subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)


def run_folder(name: str, *options: str, python: str = sys.executable) -> tuple[Counter[str], list[str]]:
    """Run the tests of a folder."""
    more = VARIABLES.get(name, {})
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        line = [
            python,
            "-m",
            "pytest",
            f"--junitxml={results}",
            "-o=junit_family=xunit1",
            *OPTIONS.get(name, [f"tests/{name}"]),
            *options,
        ]
        code = subprocess.run(line, cwd=ROOT, env=os.environ | more, check=False).returncode
        counts, failures = _read(results) if results.exists() else (Counter(), [])
    if code not in (0, 5) and not failures:  # 5: there are none
        counts["error"] += 1
        failures.append(f"ERROR tests/{name}: pytest ended with exit code {code}")
    return counts, failures


def _read(results: Path) -> tuple[Counter[str], list[str]]:
    counts: Counter[str] = Counter()
    failures: list[str] = []
    for case in ElementTree.parse(results).iter("testcase"):
        kinds = {child.tag for child in case}
        for tag, word in (("failure", "failed"), ("error", "error")):
            if tag in kinds:
                counts[word] += 1
                failures.append(f"{word.upper()} {_place(case)}")
        if not kinds & {"failure", "error"}:
            counts["skipped" if "skipped" in kinds else "passed"] += 1
    return counts, failures


def _place(case: ElementTree.Element) -> str:
    """The test as pytest takes it: file, class if there is one, name."""
    file = case.get("file", "")
    group = case.get("classname", "").removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".")
    return "::".join(part for part in (file, group, case.get("name", "")) if part)


def timed(name: str) -> Tier:
    print(f"\n{f' {name} ':─^80}", flush=True)
    began, cpu = time.monotonic(), _cpu_s()
    counts, failures = lint() if name == "lint" else run_folder(name)
    return Tier(name, time.monotonic() - began, _cpu_s() - cpu, counts, failures)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def told(counts: Counter[str]) -> str:
    """Sums in pytest's words."""
    many = {"error": "errors"}
    found = (f"{n} {many.get(word, word) if n > 1 else word}" for word in WORDS if (n := counts[word]))
    return ", ".join(found) or "ok"


def closing(tiers: list[Tier]) -> str:
    """The line that pytest would close with, had it run all of them at once."""
    total = sum((tier.counts for tier in tiers), Counter[str]())
    seconds = sum(tier.wall_s for tier in tiers)
    minutes = f" ({int(seconds) // 60}:{int(seconds) % 60:02})" if seconds >= 60 else ""
    return f"{f' {told(total)} in {seconds:.2f}s{minutes} ':=^80}"


def main(names: Iterable[str]) -> int:
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    os.environ["MISSING_PACKAGES_FAIL"] = "1"  # make has installed them, see tests/support/packages.py
    tiers = [timed(name) for name in names]
    print(f"\n{'':─^80}")
    for failure in (failure for tier in tiers for failure in tier.failures):
        print(failure)
    for tier in tiers:
        print(f"{tier.name:<12}{tier.wall_s:6.0f} s {tier.cpu_s:6.0f} s of processor time   {told(tier.counts)}")
    print(closing(tiers))
    return int(any(tier.failures for tier in tiers))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
