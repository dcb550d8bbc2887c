"""ResNet-50 and GPT-2 small on one GPU: pipeline beside a script written by hand, in one process and in turn.

    python benchmarks/gpu.py                       # on a machine with a CUDA GPU; a quarter of an hour
    python benchmarks/gpu.py --tests               # after the tests in tests/slow/gpu: `make gpu`
    python benchmarks/gpu.py --device cpu --tiny   # that all of it works: seconds, the figures mean nothing

bf16 by autocast, images in channels_last, with and without torch.compile. For each: samples/s and their spread, the
share of the matmul peak that the model's own operations come to (MFU; the peak is measured on the same device), peak
memory, and for pipeline how long a step waits for data, and the utilization. pipeline runs twice: as a measurement,
which reports between its windows, and as a training, whose reports are part of its time.

Needs torch, and of this project's dependencies neither Ray nor MLflow: pipeline trains in this process through its
launcher `inprocess` with a journal. Writes results/gpu.json and the table of docs/status.md, or with --out both into
another folder.
"""

import argparse
import gc
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from contextlib import closing
from datetime import date
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import gpu_page
import torch
from gpu_work import CASES, TINY, Case
from pydantic import BaseModel
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from pipeline.experiment.schema import Experiment
from pipeline.experiment.targets import BUILT_IN
from pipeline.launch.base import Session
from pipeline.launch.inprocess import Launcher
from pipeline.protocol.trial import Baseline, Training, Trial
from pipeline.protocol.trial_result import TrialResult
from pipeline.record.recorder import Recorder
from pipeline.tasks import Loss
from pipeline.train.order import mix
from pipeline.train.ranks import synchronize

RESULTS = Path(__file__).parent / "results"
SEED, LOG_EVERY = 17, 10
WARMUP, STEPS, WINDOWS = 20, 20, 3
TINY_STEPS = (2, 2, 2)
TRAINING = gpu_page.TRAINING


class Figures(BaseModel):
    """One way to do one case, over all rounds."""

    case: str
    who: str
    compiled: bool
    samples_per_second: list[float]
    """Of all windows of all rounds."""
    mfu: float
    """The model's floating-point operations in a second, over those of a large bf16 matmul."""
    peak_memory_mb: float
    """Of the device; on CPU of this process, both ways together."""
    data_wait_ms: float | None = None
    """What the loader adds to a step, as pipeline measures it."""
    data_wait_share: float | None = None
    """The same as a part of the step's time."""
    utilization: float | None = None
    """Percent of the time in which a kernel ran."""
    first_losses: list[float]
    """Of a few steps; both ways begin with the same weights, but deal batches in another order."""


class Result(BaseModel):
    """All that was measured."""

    device: str
    torch: str
    tiny: bool
    date: str
    peak_tflops: float
    """Of a bf16 matmul."""
    remarks: list[str]
    figures: list[Figures]
    tests: dict[str, str]
    """Outcomes of the GPU tests by name: passed; or why not; empty if they did not run."""


def main() -> int:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, few steps")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="leave torch.compile out")
    parser.add_argument("--tests", action="store_true", help="run tests/slow/gpu first")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of gpu.json and its table")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA GPU here; try --device cpu --tiny", file=sys.stderr)
        return 3
    if arguments.device == "cpu" and not arguments.tiny:
        print("ResNet-50 and GPT-2 take hours on a CPU; add --tiny", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    tests = tested(arguments.out / "gpu-tests.xml") if arguments.tests else {}
    result = measure(arguments.device, tiny=arguments.tiny, rounds=arguments.rounds, eager=arguments.eager)
    result = result.model_copy(update={"tests": tests})
    (arguments.out / "gpu.json").write_text(result.model_dump_json(indent=1) + "\n")
    if arguments.out == RESULTS:
        gpu_page.update(gpu_page.PAGE, result.model_dump())
    else:
        (arguments.out / "gpu.md").write_text(gpu_page.table(result.model_dump()))
    print(gpu_page.table(result.model_dump()))
    return int(any(outcome.startswith(("failed", "error")) for outcome in tests.values()))


def tested(results: Path) -> dict[str, str]:
    """Run the tests that need a GPU in a process of their own; return their outcomes by name."""
    root = Path(__file__).parents[1]
    line = ["-m", "pytest", "--noconftest", "-o", "filterwarnings=default", f"--junitxml={results}", "tests/slow/gpu"]
    subprocess.run([sys.executable, *line], cwd=root, check=False)
    if not results.is_file():
        return {"tests/slow/gpu": "error: pytest wrote no results"}
    return dict(map(_outcome, ElementTree.parse(results).iter("testcase")))


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    words = {"failure": "failed", "error": "error", "skipped": "skipped"}
    told = [f"{words[part.tag]}: {part.get('message', '').splitlines()[0]}" for part in case if part.tag in words]
    return case.get("name", ""), told[0] if told else "passed"


def measure(device: str, *, tiny: bool, rounds: int, eager: bool) -> Result:
    """All cases, both ways in turn."""
    peak = matmul_peak(torch.device(device), size=256 if tiny else 8192)
    figures = []
    for name, case in (TINY if tiny else CASES).items():
        operations = model_flops(case, device=torch.device(device))
        for compiled in (False,) if eager else (False, True):
            ways: dict[str, Callable[..., Figures]] = {"bare": bare, "pipeline": ours}
            ways[TRAINING] = partial(ours, trains=True)
            done: dict[str, list[Figures]] = {who: [] for who in ways}
            for _ in range(rounds):
                for who, way in ways.items():
                    done[who].append(way(name, case, device=device, compiled=compiled, tiny=tiny))
            for parts in done.values():
                windows = [value for part in parts for value in part.samples_per_second]
                mfu = median(windows) * operations / peak
                figures.append(parts[-1].model_copy(update={"samples_per_second": windows, "mfu": mfu}))
    shown = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return Result(
        device=shown,
        torch=torch.__version__,
        tiny=tiny,
        date=date.today().isoformat(),
        peak_tflops=peak / 1e12,
        remarks=[],
        figures=figures,
        tests={},
    )


def matmul_peak(device: torch.device, *, size: int) -> float:
    """Floating-point operations in a second of a bf16 matmul of square matrices."""
    one, other = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    fastest = float("inf")
    for _ in range(5):
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(10):
            one @ other
        synchronize(device)
        fastest = min(fastest, (time.perf_counter() - begin) / 10)
    return 2 * size**3 / fastest


def model_flops(case: Case, *, device: torch.device) -> float:
    """Floating-point operations of forward and backward for one sample: those of matmuls and convolutions."""
    model, task = made(case.model).to(device), made(case.task)
    batch = [tensor[:2].to(device) for tensor in made(case.data)[0].tensors]
    with FlopCounterMode(display=False) as counter:
        mean_of(task(model, batch), batch).backward()
    return counter.get_total_flops() / 2


def mean_of(found: Loss | Tensor, batch: list[Tensor]) -> Tensor:
    """The loss of a batch that a task returned."""
    if isinstance(found, Tensor):
        return found
    return found.sum / (len(batch[0]) if found.count is None else found.count)


def bare(name: str, case: Case, *, device: str, compiled: bool, tiny: bool) -> Figures:
    """A loop as one would write it for this model."""
    target = torch.device(device)
    _forget(target)
    torch.manual_seed(mix(SEED, "model"))
    model = made(case.model).to(target)
    layout = torch.channels_last if case.memory_format == "channels_last" else torch.contiguous_format
    if layout is torch.channels_last:
        model.to(memory_format=layout)
    optimizer = made(case.optimizer, model.parameters())
    task = made(case.task)
    called: nn.Module = torch.compile(model) if compiled else model  # type: ignore[assignment]
    loader: DataLoader[Any] = DataLoader(
        made(case.data)[0],
        batch_size=case.batch,
        shuffle=True,
        drop_last=True,
        num_workers=case.num_workers,
        persistent_workers=case.num_workers > 0,
        pin_memory=device == "cuda",
    )
    warmup, steps, windows = TINY_STEPS if tiny else (WARMUP, STEPS, WINDOWS)
    losses: list[Tensor] = []
    seconds: list[float] = []
    begin = 0.0
    while len(seconds) < windows:
        for batch in loader:
            moved = [tensor.to(target, non_blocking=True) for tensor in batch]
            moved = [each.contiguous(memory_format=layout) if each.ndim == 4 else each for each in moved]
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = mean_of(task(called, moved), moved)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            if len(losses) % LOG_EVERY == 0:
                losses[-1].item()
            if len(losses) >= warmup and (len(losses) - warmup) % steps == 0:
                synchronize(target)
                now = time.perf_counter()
                seconds += [now - begin] if begin else []
                begin = now
            if len(seconds) == windows:
                break
    return Figures(
        case=name,
        who="bare",
        compiled=compiled,
        samples_per_second=[steps * case.batch / each for each in seconds],
        mfu=0.0,
        peak_memory_mb=torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else _resident_mb(),
        first_losses=torch.stack(losses[:warmup]).tolist(),
    )


def ours(name: str, case: Case, *, device: str, compiled: bool, tiny: bool, trains: bool = False) -> Figures:
    """A measurement of pipeline, with its journal, or a training of as many steps."""
    _forget(torch.device(device))
    trial = trial_of(case, device=device, compiled=compiled, tiny=tiny, trains=trains)
    with tempfile.TemporaryDirectory() as folder, closing(Recorder(Path(folder), subscribers=[])) as recorder:
        session = Session(folder=Path(folder), receive=recorder.receive, parallel=trial.experiment.parallel)
        with Launcher(session) as launcher:
            outcome = launcher.launch(trial)
    if outcome.finished is None:
        raise outcome.error
    result: TrialResult = outcome.finished.result
    speed = result.samples_per_second  # of a measurement's three windows: these are all of them
    return Figures(
        case=name,
        who=TRAINING if trains else "pipeline",
        compiled=compiled,
        samples_per_second=[speed.low, speed.median, speed.high],
        mfu=0.0,
        peak_memory_mb=max(result.peak_memory_mb),
        data_wait_ms=result.parts.data_wait_ms,
        data_wait_share=result.parts.data_wait_ms / result.step_ms.median,
        utilization=result.gpu_utilization[0] if result.gpu_utilization else None,
        first_losses=list(result.losses),
    )


def trial_of(case: Case, *, device: str, compiled: bool, tiny: bool, trains: bool) -> Trial:
    """What the launcher gets; made by hand, since planning looks for GPUs with NVIDIA's library."""
    warmup, steps, windows = TINY_STEPS if tiny else (WARMUP, STEPS, WINDOWS)
    length = {"steps": warmup + steps * windows} if trains else {"epochs": 100}
    train = {**length, "global_batch_size": case.batch, "precision": "bf16", "memory_format": case.memory_format}
    experiment = Experiment.model_validate(
        {
            "name": "gpu",
            "seed": SEED,
            "model": case.model,
            "data": case.data,
            "task": case.task,
            "optimizer": case.optimizer,
            "loader": {"num_workers": case.num_workers},
            "train": {**train, **({"compile": True} if compiled else {})},
            "benchmark": {"warmup_steps": warmup, "steps": steps, "windows": windows},
        }
    )
    shared: dict[str, Any] = {
        "name": "main",
        "experiment": experiment,
        "strategy": "single",
        "launcher": "inprocess",
        "workers": 1,
        "devices_per_worker": 1 if device == "cuda" else 0,
        "device": "cuda" if device == "cuda" else "cpu",
        "cpus_per_worker": torch.get_num_threads(),
        "allowed": (*BUILT_IN, "gpu_work"),
    }
    return Training(**shared, train_only=True) if trains else Baseline(**shared)


def made(section: dict[str, Any], *arguments: Any) -> Any:
    """What a section of the experiment names."""
    keywords = {name: value for name, value in section.items() if name != "_target_"}
    module, _, name = section["_target_"].rpartition(".")
    return getattr(import_module(module), name)(*arguments, **keywords)


def _forget(device: torch.device) -> None:
    """Make a fresh start: compiled code and cached memory of the run before are gone."""
    torch.compiler.reset()
    gc.collect()  # what reference cycles hold would count in the peak
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _resident_mb() -> float:
    import psutil  # a GPU's memory is counted by torch

    return float(psutil.Process().memory_info().rss) / 2**20


if __name__ == "__main__":
    sys.exit(main())
