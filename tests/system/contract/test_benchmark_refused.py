"""Wishes for a benchmark that can't be met."""

from typing import Any

import pytest

DDP = ["parallel.strategy=ddp", "parallel.launcher=torchrun", "parallel.workers=2"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--strategies", "single,dpp"], "--strategies single,dpp: 'dpp' is not a strategy; did you mean ddp?"),
        (["--workers", "1,0"], "--workers 1,0: '0' is not a number of workers. Use numbers of at least 1, e.g. 1,2,4."),
        (["--workers", "two"], "--workers two: 'two' is not a number of workers"),
        (["--workers", ""], "--workers : '' is not a number of workers"),
        (["--repeats", "0"], "should be greater than or equal to 1"),
        (["--batch-sizes", "8,large"], "--batch-sizes 8,large: 'large' is not a batch size"),
        (["--predict", "8", "--network", "fast"], "--network fast: 'fast' is not understood"),
        (["--network", "10Gbit,50us"], "--network: is used for predictions only. Add --predict, e.g. --predict 8,64."),
        (["--predict", "5000"], "--predict: 5000 workers cannot be predicted. Use 2 to 16, as many as"),
        (["--vary", "optimizer.lr"], "--vary optimizer.lr: write key=value,value, e.g. --vary optimizer.lr=0.1,0.05"),
        (["--vary", "optimizer.lr=0.1"], "--vary: optimizer.lr has 1 value. Give each key the same number of values"),
        (["--vary", "optimizer.lr=a,b"], "command line: optimizer.lr=a: optimizer"),
        (["--vary", "tracking.uri=a,b"], "--vary tracking.uri: the whole benchmark sets this key"),
    ],
)
def test_bad_wishes(command: Any, arguments: list[str], told: str) -> None:
    ended = command("benchmark", "lab.yaml", *arguments)
    assert ended.code == 2
    assert told in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.output


@pytest.mark.parametrize(
    "arguments", [["parallel.launcher=inprocess"], ["parallel.launcher=torchrun", "parallel.cpus_per_worker=2"]]
)
def test_a_network_needs_two_workers(command: Any, arguments: list[str]) -> None:
    ended = command("benchmark", "lab.yaml", "--predict", "8", *arguments)
    assert ended.code == 3
    assert "so the network cannot be measured. Give it, e.g. --network 10Gbit,50us" in " ".join(ended.stderr.split())
