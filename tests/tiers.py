"""Run tiers of tests, then say what each took; pytest's sums are the last line.

    python tests/tiers.py lint unit contract

Tiers of `make test` run beside each other, others one after the other. A tier that fails lets the others run. The exit
code is 1 if anything failed.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LINT = ("ruff format --check .", "ruff check .", "mypy", "lint-imports")
SPREAD = ["--numprocesses=logical", "--maxschedchunk=8"]
"""Over all cores, test by test."""
GROUPED = ["--numprocesses=3", "--dist=loadfile", "--no-loadscope-reorder"]
"""Three at a time, as processes wait much; tests that share something costly stay together."""
TOGETHER = ("journeys", "contract", "replay", "unit")
"""Tiers that run in one session if several of them are asked for, the longest tests first.

Each process of a session takes 15 s of processor time to import torch, Ray and MLflow. While tests of one tier wait for
processes, those of another compute.
"""
OPTIONS = {
    "unit": SPREAD,
    "contract": GROUPED,
    "replay": GROUPED,
    "journeys": GROUPED,
    "fuzz": ["-k=fuzz", *SPREAD],
    "gpu": ["-o=filterwarnings=default"],  # as without conftest.py, in the folder of `make gpu-bundle`
}
"""Of pytest, by tier; one that isn't here runs its folder in one process. `fuzz` draws other examples each time."""
FOLDERS = {"fuzz": "unit"}
"""Of tiers that are not named as their folder."""
VARIABLES = {"fuzz": {"HYPOTHESIS_PROFILE": "default"}, "gpu": {"GPU_REHEARSAL": "1"}}
"""Of the environment, by tier. `gpu` runs on the CPU where there is no GPU, as far as that is possible."""
WORDS = ("failed", "passed", "skipped", "error")


class Tier(NamedTuple):
    """What became of a tier."""

    name: str
    took_s: float
    """Seconds; of tiers that ran together, the sum of what their tests took."""
    counts: Counter[str]
    failures: list[str]


def lint() -> Tier:
    """Run the checks of the code side by side; show what those that fail say."""
    began = time.monotonic()
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(_check, LINT))
    failures = []
    for line, check in zip(LINT, done, strict=True):
        print(f"\n{line}: {'ok' if check.returncode == 0 else 'failed'}", flush=True)
        if check.returncode:
            print(check.stdout, flush=True)
            failures.append(f"FAILED {line}")
    return Tier("lint", time.monotonic() - began, Counter(error=len(failures)), failures)


def _check(line: str) -> subprocess.CompletedProcess[str]:
    program, *arguments = line.split()
    command = [str(Path(sys.executable).parent / program), *arguments]
    return subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)


def run_folders(names: Sequence[str], *options: str, python: str = sys.executable) -> list[Tier]:
    """Run the tests of tiers in one session of pytest."""
    more = VARIABLES.get(names[0], {})
    of_pytest = OPTIONS.get(names[0], []) if len(names) == 1 else GROUPED
    folders = {name: f"tests/{FOLDERS.get(name, name)}" for name in names}
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        line = [python, "-m", "pytest", f"--junitxml={results}", "-o=junit_family=xunit1"]
        line += [*folders.values(), *of_pytest, *options]
        code = subprocess.run(line, cwd=ROOT, env=os.environ | more, check=False).returncode
        cases = list(ElementTree.parse(results).iter("testcase")) if results.exists() else []
    tiers = [_read(name, [case for case in cases if _is_in(folders[name], case)]) for name in names]
    if code not in (0, 5) and not any(tier.failures for tier in tiers):  # 5: there are none
        tiers[0].counts["error"] += 1
        tiers[0].failures.append(f"ERROR {' '.join(folders.values())}: pytest ended with exit code {code}")
    return tiers


def _is_in(folder: str, case: ElementTree.Element) -> bool:
    return case.get("file", folder + "/").startswith(folder + "/")


def _read(name: str, cases: Iterable[ElementTree.Element]) -> Tier:
    counts: Counter[str] = Counter()
    failures: list[str] = []
    took_s = 0.0
    for case in cases:
        took_s += float(case.get("time", 0))
        kinds = {child.tag for child in case}
        for tag, word in (("failure", "failed"), ("error", "error")):
            if tag in kinds:
                counts[word] += 1
                failures.append(f"{word.upper()} {_place(case)}")
        if not kinds & {"failure", "error"}:
            counts["skipped" if "skipped" in kinds else "passed"] += 1
    return Tier(name, took_s, counts, failures)


def _place(case: ElementTree.Element) -> str:
    """The test as pytest takes it: file, class if there is one, name."""
    file = case.get("file", "")
    group = case.get("classname", "").removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".")
    return "::".join(part for part in (file, group, case.get("name", "")) if part)


def run(names: Sequence[str]) -> list[Tier]:
    """Run tiers beside each other: lint, and one session of pytest for all others."""
    title = f" {', '.join(names)} "
    print(f"\n{title:─^80}", flush=True)
    tests = [name for name in names if name != "lint"]
    with ThreadPoolExecutor() as pool:
        checks = [pool.submit(lint) for name in names if name == "lint"]
        ran = run_folders(tests) if tests else []
        return [check.result() for check in checks] + ran


def arrange(names: Sequence[str]) -> list[list[str]]:
    """Return what runs one after the other: tiers that run together, then each of the others by itself."""
    together = [name for name in TOGETHER if name in names]
    if together:
        together = [name for name in names if name == "lint"] + together
    return [group for group in (together, *([name] for name in names if name not in together)) if group]


def told(counts: Counter[str]) -> str:
    """Sums in pytest's words."""
    many = {"error": "errors"}
    found = (f"{n} {many.get(word, word) if n > 1 else word}" for word in WORDS if (n := counts[word]))
    return ", ".join(found) or "ok"


def closing(tiers: list[Tier], took_s: float) -> str:
    """The line that pytest would close with, had it run all of them at once."""
    total = sum((tier.counts for tier in tiers), Counter[str]())
    minutes = f" ({int(took_s) // 60}:{int(took_s) % 60:02})" if took_s >= 60 else ""
    return f"{f' {told(total)} in {took_s:.2f}s{minutes} ':=^80}"


def main(names: Sequence[str]) -> int:
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    os.environ["MISSING_PACKAGES_FAIL"] = "1"  # make has installed them, see tests/support/packages.py
    began = time.monotonic()
    tiers = [tier for group in arrange(names) for tier in run(group)]
    print(f"\n{'':─^80}")
    for failure in (failure for tier in tiers for failure in tier.failures):
        print(failure)
    for tier in tiers:
        print(f"{tier.name:<12}{tier.took_s:6.0f} s   {told(tier.counts)}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{'':<12}{used.ru_utime + used.ru_stime:6.0f} s of processor time")
    print(closing(tiers, time.monotonic() - began))
    return int(any(tier.failures for tier in tiers))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
