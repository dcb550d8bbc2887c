"""What `pipeline compare --target` says of two experiments whose true factors are known.

    python benchmarks/known_factors.py    # three minutes

Each step of the model waits a fixed time, and brings the loss down by a fixed amount, which depends on the seed as luck
does. The second experiment waits half as long, needs 1.1 times the steps, and so reaches the target 1.82 times sooner.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from measure import ROOT, machine, table, write

WAIT_MS, RATE, NEEDED, TARGET, SEEDS = 200.0, 2.0, 1.1, 0.5, 5
MODEL = '''
import time

import torch
from torch import nn


class Clockwork(nn.Module):
    """A parameter that L1 loss moves by a fixed amount in each step, after a wait."""

    def __init__(self, wait_ms):
        super().__init__()
        self.wait_s = wait_ms / 1000
        self.w = nn.Parameter(torch.zeros(1))
        self.register_buffer("luck", torch.exp(0.1 * torch.randn(1)))

    def forward(self, inputs):
        if self.training:
            time.sleep(self.wait_s)
        return (self.w * self.luck).expand_as(inputs)


def ones():
    made = torch.utils.data.TensorDataset(torch.zeros(64, 1), torch.ones(64, 1))
    return made, made
'''
EXPERIMENT = """
name: clockwork
seed: 1
model: {{_target_: clockwork.Clockwork, wait_ms: {wait_ms}}}
data: {{_target_: clockwork.ones}}
loss: {{_target_: torch.nn.L1Loss}}
optimizer: {{_target_: torch.optim.SGD, lr: {lr}}}
train: {{epochs: 12, global_batch_size: 8}}
parallel: {{strategy: single, launcher: inprocess, workers: 1}}
"""


def main() -> None:
    """Compare, and write what was found beside what is true."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "clockwork.py").write_text(MODEL, encoding="utf-8")
        (Path(folder) / "pyproject.toml").write_text('[tool.pipeline]\npackages = ["clockwork"]\n', encoding="utf-8")
        for name, wait_ms, lr in (("a", WAIT_MS, 0.0125), ("b", WAIT_MS / RATE, 0.0125 / NEEDED)):
            (Path(folder) / f"{name}.yaml").write_text(EXPERIMENT.format(wait_ms=wait_ms, lr=lr), encoding="utf-8")
        words = ["compare", "a.yaml", "b.yaml", "--target", str(TARGET), "--seeds", str(SEEDS), "--json"]
        ended = subprocess.run(
            [sys.executable, "-m", "pipeline", *words],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            check=True,
        )
    found = json.loads(ended.stdout)
    true = {"sooner": RATE / NEEDED, "rate": RATE, "samples": NEEDED, "hours": NEEDED / RATE}
    facts = {fact["key"]: {name: fact[name] for name in ("value", "low", "high")} for fact in found["facts"]}
    rows = {name: {"true": value, **facts[f"target_{name}"]} for name, value in true.items()}
    shown = [[name, f"{row['true']:.3g}", f"{row['value']:.3g} ({row['low']:.3g} to {row['high']:.3g})"]
             for name, row in rows.items()]  # fmt: skip
    text = f"{machine()}. {SEEDS} pairs.\n\n{table(['factor', 'true', 'reported, 95% CI'], shown)}"
    write("known_factors", {"machine": machine(), "said": found["headline"], "factors": rows}, text)


if __name__ == "__main__":
    main()
