"""The same training through pipeline, by hand, and through other libraries, interleaved.

    python benchmarks/peers.py                                  # as many rounds as fit into 20 minutes, five at most
    python benchmarks/peers.py --rounds 1 --workloads mlp       # a part of it
    python benchmarks/peers.py --only "by hand*" "pipeline*"    # without the other libraries

The other libraries are the optional dependencies "bench". Writes results/peers.json and .md, and the block of
docs/status.md. Ends with 1 if a competitor had other losses than the hand-written script.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import psutil
import yaml
from measure import RESULTS, interleave, machine, ratio, run, spread, table, write
from workloads import SEED, WORKLOADS, Workload

HERE = Path(__file__).parent
BY_HAND = "by hand"
LIBRARIES = ("torch", "ray", "mlflow", "lightning", "accelerate", "transformers")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "PYTHONPATH": str(HERE),
    "ACCELERATE_USE_CPU": "true",
}
SAME = 0.01
"""Largest difference of two losses, relative to the first loss: rounding, which training amplifies."""
COMPETITORS = {
    ("mlp", 1): (BY_HAND, "pipeline", "Lightning", "Accelerate", "transformers' Trainer"),
    ("mlp", 2): (
        *(BY_HAND, "pipeline, torchrun", "pipeline, ray", "Lightning"),
        *("Accelerate", "transformers' Trainer", "Ray Train"),
    ),
    **{(name, 2): (BY_HAND, "pipeline, torchrun", "pipeline, ray") for name in ("resnet", "gpt")},
}
SCRIPTS = {
    BY_HAND: "by_hand.py",
    "Lightning": "with_lightning.py",
    "Accelerate": "with_accelerate.py",
    "transformers' Trainer": "with_transformers.py",
    "Ray Train": "with_ray_train.py",
}
STARTED_BY_TORCHRUN = (BY_HAND, "Accelerate", "transformers' Trainer")


class Run(NamedTuple):
    """What one competitor did in one round."""

    rate: float
    """Samples per second: median over the epochs but the first."""
    first_step_s: float
    """From the start of the command to the second step's loss."""
    prompt_s: float
    """From the start of the command to its end."""
    memory_mib: float
    """Largest proportional memory of all processes."""
    losses: list[float]
    """Mean over the ranks, of the first 20 steps and the last one."""


Key = tuple[str, int, str]
"""Workload, workers, competitor."""


def main() -> int:
    """Measure and write."""
    arguments = _parse()
    keys = [(workload, workers, name) for (workload, workers), names in COMPETITORS.items() for name in names]
    chosen = [
        key for key in keys
        if key[0] in arguments.workloads and any(fnmatch(key[2], pattern) for pattern in (BY_HAND, *arguments.only))
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "warm-up").mkdir()
        _race(("resnet", 1, "pipeline"), Path(folder) / "warm-up")  # creates MLflow's database, fills the file cache
        busy = psutil.cpu_percent(interval=3.0) / 100
        ways = {_label(key): _retried(partial(_race_in_new_folder, key, Path(folder))) for key in chosen}
        done = interleave(ways, rounds=arguments.rounds, minutes=arguments.minutes)
    runs = {key: done[_label(key)] for key in chosen}
    head = [
        f"{machine()}; {', '.join(f'{name} {version(name)}' for name in LIBRARIES)}. "
        f"{len(runs[chosen[0]])} rounds; other processes used {busy:.0%} of the cores before the first one."
    ]
    kept = {_label(key): [one._replace(losses=one.losses[-1:])._asdict() for one in of] for key, of in runs.items()}
    result = {"machine": head[0], "runs": kept}
    write("peers", result, "\n\n".join([*head, *_tables(runs)]), out=arguments.out)
    if others := [_label(key) for key in chosen if not _trains_the_same(runs[key], runs[_reference(key)])]:
        print(f"other losses than by hand: {', '.join(others)}")
    return int(bool(others))


def _race_in_new_folder(key: Key, base: Path) -> Run:
    with tempfile.TemporaryDirectory(dir=base) as folder:
        return _race(key, Path(folder))


def _race(key: Key, folder: Path) -> Run:
    workload, workers, name = key
    work = WORKLOADS[workload]
    make = _command_of_pipeline if name.startswith("pipeline") else _command_of_script
    ended = run(make(key, folder), folder=folder, environment=ENVIRONMENT)
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(workers)]
    times, per_epoch = ranks[0]["times"], work.steps
    epochs = times[per_epoch::per_epoch]
    seconds = [end - start for start, end in pairwise(epochs)]
    losses = [fmean(step) for step in zip(*(rank["losses"] for rank in ranks), strict=True)]
    return Run(
        rate=work.samples / median(seconds),
        first_step_s=times[1] - ended.started,
        prompt_s=ended.seconds,
        memory_mib=max(ended.memory_mib, default=0.0),
        losses=[*losses[:20], losses[-1]],
    )


def _retried(way: Callable[[], Run]) -> Callable[[], Run]:
    """Run it again if it failed: now and then torch 2.13 aborts a process of DDP at its very end, with gloo."""

    def run_twice() -> Run:
        try:
            return way()
        except RuntimeError as error:
            print(f"failed and is started again: {str(error)[-1000:]}", flush=True)
            return way()

    return run_twice


def _command_of_script(key: Key, folder: Path) -> list[str]:
    workload, workers, name = key
    launcher = [*TORCHRUN, str(workers)] if workers > 1 and name in STARTED_BY_TORCHRUN else []
    asked = ["--workload", workload, "--workers", str(workers), "--out", str(folder)]
    return [sys.executable, *launcher, str(HERE / "competitors" / SCRIPTS[name]), *asked]


def _command_of_pipeline(key: Key, folder: Path) -> list[str]:
    """Return ``pipeline run`` as users have it, with terminal, event log and MLflow."""
    workload, workers, name = key
    (folder / "pyproject.toml").write_text('[tool.pipeline]\npackages = ["workloads"]\n')
    (folder / "experiment.yaml").write_text(yaml.safe_dump(_experiment(workload, WORKLOADS[workload], folder)))
    launcher = name.partition(", ")[2] or "inprocess"
    asked = [f"parallel.launcher={launcher}", f"parallel.workers={workers}"]
    asked.append(f"parallel.strategy={'ddp' if workers > 1 else 'single'}")
    return [sys.executable, "-m", "pipeline", "run", "experiment.yaml", "--no-baseline", *asked]


def _experiment(workload: str, work: Workload, folder: Path) -> dict[str, object]:
    """Return the experiment; checkpoints and the export of the model are off, as no other competitor writes any."""
    return {
        "name": "bench",
        "seed": SEED,
        "model": {"_target_": "workloads.Model", "workload": workload, "out": str(folder)},
        "data": {"_target_": "workloads.samples", "workload": workload},
        "sampler": {"_target_": "workloads.order"},
        "task": {"_target_": "pipeline.tasks.FromModel"},
        "optimizer": work.optimizer,
        "train": {"epochs": work.epochs, "global_batch_size": work.batch},
        "checkpoint": {"keep": 0},
        "parallel": {"cpus_per_worker": 1},
        "tracking": {"uri": "sqlite:///../mlflow.db", "log_model": False},
    }


def _tables(runs: dict[Key, list[Run]]) -> list[str]:
    """Return a table for each workload: ratios to the hand-written script within the rounds, and the values."""
    tables = []
    head = [
        "",
        "throughput, x by hand",
        "samples/s",
        "first step, s",
        "x by hand",
        "prompt, s",
        "x by hand",
        "MiB, all",
    ]
    for workload, workers in dict.fromkeys(key[:2] for key in runs):
        rows = []
        for key, own in runs.items():
            if key[:2] == (workload, workers):
                rows.append(_row(key[2], own, runs[_reference(key)]))
        step_ms = 1e3 * WORKLOADS[workload].batch / median(one.rate for one in runs[workload, workers, BY_HAND])
        title = f"**{workload}, {workers} worker{'s' if workers > 1 else ''}**, by hand {step_ms:.2g} ms a step"
        tables += [title, table(head, rows)]
    return tables


def _row(name: str, own: Sequence[Run], base: Sequence[Run]) -> list[str]:
    pairs = list(zip(own, base, strict=True))
    return [
        name,
        "1" if name == BY_HAND else str(ratio([(one.rate, two.rate) for one, two in pairs])),
        spread([one.rate for one in own], ",.0f"),
        spread([one.first_step_s for one in own]),
        "1" if name == BY_HAND else str(ratio([(one.first_step_s, two.first_step_s) for one, two in pairs])),
        spread([one.prompt_s for one in own]),
        "1" if name == BY_HAND else str(ratio([(one.prompt_s, two.prompt_s) for one, two in pairs])),
        f"{median(one.memory_mib for one in own):,.0f}",
    ]


def _trains_the_same(own: Sequence[Run], base: Sequence[Run]) -> bool:
    bound = SAME * base[0].losses[0]
    return all(abs(a - b) <= bound for one in own for a, b in zip(one.losses, base[0].losses, strict=True))


def _reference(key: Key) -> Key:
    return (*key[:2], BY_HAND)


def _label(key: Key) -> str:
    return f"{key[0]} x {key[1]}, {key[2]}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="at most")
    parser.add_argument("--minutes", type=float, default=20, help="no round starts that would end later")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--only", nargs="+", metavar="NAME", default=["*"], help='competitors, e.g. "pipeline*"')
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
