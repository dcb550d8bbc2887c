"""Compare the speedup that `pipeline run` reports with the one that a hand-written script has.

    python benchmarks/speedup.py [--rounds 3]       # three minutes a round

In each round: `pipeline run experiments/resnet.yaml` with one epoch, then pairs of a script for torchrun that does the
same training on one worker and on two, interleaved. The interval of the script is Student's t of these pairs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

from measure import RESULTS, ROOT, Ratio, interleave, machine, ratio, table, write

PAIRS = 5
GLOBAL_BATCH, WARMUP, STEPS, WINDOWS = 128, 3, 5, 3
AS_WORKER = "--as-worker"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    done = interleave(
        {"reported": measure_reported, "script": lambda: measure_script(arguments.pairs)}, rounds=arguments.rounds
    )
    rounds = list(zip(done["reported"], done["script"], strict=True))
    overlapping = sum(one.low <= two.high and two.low <= one.high for one, two in rounds)
    rows = [[str(number), str(one), str(two)] for number, (one, two) in enumerate(rounds, start=1)]
    text = "\n\n".join(
        [
            f"{machine()}. Speedup of two workers, with 95% confidence intervals. The intervals overlap in "
            f"{overlapping} of {len(rounds)} rounds.",
            table(["round", "reported speedup", "the script's"], rows),
        ]
    )
    named = [{"reported": one._asdict(), "script": two._asdict()} for one, two in rounds]
    write("speedup", {"machine": machine(), "overlapping": overlapping, "rounds": named}, text, out=arguments.out)


def measure_reported() -> Ratio:
    """Return the speedup that a run reports."""
    settings = ["parallel.launcher=torchrun", "train.epochs=1", "--json"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pipeline", "run", ROOT / "experiments" / "resnet.yaml", *settings]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    facts = json.loads(done.stdout)["facts"]
    fact = next(fact for fact in facts if (fact["key"], fact["trial"]) == ("speedup", "main"))
    return Ratio(fact["value"], fact["low"], fact["high"])


def measure_script(pairs: int) -> Ratio:
    """Return the speedup of the script."""
    rates = interleave({"1": lambda: run_script(1), "2": lambda: run_script(2)}, rounds=pairs)
    return ratio(list(zip(rates["2"], rates["1"], strict=True)))


def run_script(workers: int) -> float:
    """Return the throughput of the script."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    done = subprocess.run([*command, __file__, AS_WORKER], capture_output=True, text=True, check=True)
    return median(json.loads(done.stdout))


def train_by_hand() -> None:
    """Train experiments/resnet.yaml as one would write it for torchrun; print the throughput of each window."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    from pipeline.data import digits
    from pipeline.models import resnet18

    torch.set_num_threads(1)
    world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(17)
    train, _ = digits(image_size=32)
    model: nn.Module = resnet18(num_classes=10, in_channels=1, width=16, norm="group")
    if world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=120)
    criterion = nn.CrossEntropyLoss()
    sampler: DistributedSampler[object] = DistributedSampler(train, seed=17)
    loader: DataLoader[object] = DataLoader(train, batch_size=GLOBAL_BATCH // world_size, sampler=sampler)
    times: list[float] = []
    while len(times) <= WARMUP + STEPS * WINDOWS:
        sampler.set_epoch(len(times))
        for inputs, targets in loader:
            loss = criterion(model(inputs), targets)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            times.append(time.perf_counter())
    if rank == 0:
        marks = times[WARMUP::STEPS][: WINDOWS + 1]
        print(json.dumps([GLOBAL_BATCH * STEPS / (b - a) for a, b in pairwise(marks)]))
    dist.destroy_process_group()


if __name__ == "__main__":
    if AS_WORKER in sys.argv:
        train_by_hand()
    else:
        main()
