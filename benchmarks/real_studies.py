"""What `pipeline compare` says of real trainings: a difference that is there, and luck alone.

    python benchmarks/real_studies.py    # ten minutes; writes results/real_studies.json and .md

For each experiment it trains variant A with 60 seeds, and with the first 20 of them a variant with half the width and
one with half the learning rate. From these values it forms studies: 5 pairs of A and the half width; 200 studies of 5
pairs of different seeds of A, where only luck differs; and it compares how many trainings a given width of the interval
takes with pairs of equal seeds and with unpaired runs. The trainings run in this process, as `pipeline run` trains.
"""

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import variance
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from data_wait import Silent

from pipeline.experiment.load import load
from pipeline.experiment.targets import BUILT_IN
from pipeline.experiment.values import Direction
from pipeline.plan.resources import detect
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Training
from pipeline.results.paired import Answer, answer, is_rate
from pipeline.train.run import train

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "real_studies.json"
SEEDS, OTHERS, STUDIES, PAIRS, FIRST = 60, 20, 200, 5, 17
COMMON = (
    *("parallel.strategy=single", "parallel.launcher=inprocess", "parallel.workers=1", "tracking.log_model=false"),
    "checkpoint.keep=0",
)
EXPERIMENTS: Mapping[str, tuple[str, ...]] = {
    "tabular": ("train.epochs=5", "train.early_stopping=null", "checkpoint.best=null"),
    "resnet": ("model.width=8", "data.image_size=8", "train.epochs=4"),
    "gpt": ("model.width=32", "model.depth=1", "data.max_characters=60000", "train.epochs=4"),
}
HALF_WIDTH = {"tabular": "model.hidden=[8]", "resnet": "model.width=4", "gpt": "model.width=16"}
HALF_RATE = {"tabular": "optimizer.lr=0.005", "resnet": "optimizer.lr=0.05", "gpt": "optimizer.lr=0.0015"}
METRICS: Mapping[str, Direction] = {"validation/loss": "min", "validation/accuracy": "max"}
Values = dict[str, dict[int, float]]
"""Values by metric and seed."""


def main() -> None:
    """Train, or read the values of an earlier call, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="train nothing")
    if not parser.parse_args().page:
        torch.set_num_threads(1)
        found = {name: {kind: trained(name, more, seeds=count) for kind, more, count in variants(name)}
                 for name in EXPERIMENTS}  # fmt: skip
        machine = detect()
        known = {"machine": f"{machine.processor}, {machine.summary}", "torch": torch.__version__, "values": found}
        RESULTS.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    text = page(json.loads(RESULTS.read_text(encoding="utf-8")))
    RESULTS.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


def variants(name: str) -> list[tuple[str, tuple[str, ...], int]]:
    """Name, overrides and number of seeds of each variant of an experiment."""
    return [("A", (), SEEDS), ("half width", (HALF_WIDTH[name],), OTHERS), ("half rate", (HALF_RATE[name],), OTHERS)]


def trained(name: str, more: Sequence[str], *, seeds: int) -> Values:
    """Train a variant with several seeds."""
    values: Values = {metric: {} for metric in METRICS}
    for seed in range(FIRST, FIRST + seeds):
        overrides = [*COMMON, *EXPERIMENTS[name], *more, f"seed={seed}"]
        trial = Training(
            name="main", experiment=load(HERE.parent / "experiments" / f"{name}.yaml", overrides).experiment,
            strategy="single", launcher="inprocess", workers=1, devices_per_worker=0, device="cpu", cpus_per_worker=1,
            allowed=BUILT_IN, train_only=True,
        )  # fmt: skip
        result = train(trial, rank=Rank(), outbox=Silent())
        for metric, known in values.items():
            known[seed] = result.metrics[metric]
        print(f"{name} {' '.join(more)} seed {seed}: {result.metrics['validation/loss']:.4f}", flush=True)
    return values


def judged(pairs: Mapping[int, tuple[float, float]], metric: str) -> Answer:
    """Return the answer of the command."""
    values = [value for both in pairs.values() for value in both]
    rated = is_rate(metric, values, direction=METRICS[metric])
    return answer(pairs, metric=metric, direction=METRICS[metric], is_rate=rated)


def page(known: Mapping[str, Any]) -> str:
    """Return the tables."""
    lines = [
        "# What compare says of real trainings",
        "",
        f"{known['machine']}; torch {known['torch']}. {SEEDS} seeds of A, {OTHERS} of each variant. Written by "
        "`python benchmarks/real_studies.py`, which says what is trained.",
        "",
        f"Difference: the answer of a study of {PAIRS} pairs, A and half the width. Luck alone: share of {STUDIES} "
        f"studies of {PAIRS} pairs of different seeds of A that are called better or worse, where nothing differs. "
        "Unpaired: how many times as many trainings unpaired runs take for an interval of the same width.",
        "",
        "| experiment, metric | difference: half the width | luck alone | unpaired, half the width | half the rate |",
        "|---|---|--:|--:|--:|",
    ]
    for name, variants_ in known["values"].items():
        for metric in METRICS:
            values = {
                kind: {int(seed): value for seed, value in found[metric].items()} for kind, found in variants_.items()
            }
            first = values["A"]
            pairs = {seed: (first[seed], values["half width"][seed]) for seed in range(FIRST, FIRST + PAIRS)}
            said = judged(pairs, metric).format("A", "B")
            ratios = [ratio(first, values[kind]) for kind in ("half width", "half rate")]
            lines.append(f"| {name}, {metric} | {said} | {alarms(first, metric):.1%} | {' | '.join(ratios)} |")
    return "\n".join(lines) + "\n"


def alarms(values: Mapping[int, float], metric: str) -> float:
    """Return the share of studies of luck alone that find a difference."""
    source = random.Random(FIRST)
    found = 0
    for _ in range(STUDIES):
        drawn = source.sample(sorted(values), 2 * PAIRS)
        pairs = {one: (values[one], values[other]) for one, other in zip(drawn[:PAIRS], drawn[PAIRS:], strict=True)}
        found += judged(pairs, metric).verdict in ("better", "worse")
    return found / STUDIES


def ratio(first: Mapping[int, float], second: Mapping[int, float]) -> str:
    """Return the variance of a difference of unpaired runs, relative to that of pairs with equal seeds."""
    seeds = sorted(second)
    apart = variance(first[seed] for seed in seeds) + variance(second.values())
    paired = variance(second[seed] - first[seed] for seed in seeds)
    return f"{apart / paired:.1f}x" if paired else "all pairs are equal"


if __name__ == "__main__":
    main()
