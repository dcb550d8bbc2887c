"""Wishes for a prediction that can't be met."""

import pytest
from outer import outer_torchrun

LAB = "lab.yaml"
LINK = ["--link", "10Gbit,50us"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--link", "fast"], 2, "'fast' is not understood"),
        (["--link", "10Gbit"], 2, "10Gbit,50us"),
        ([*LINK, "--workers", "0"], 2, "--workers"),
        ([*LINK, "--workers", "5000"], 2, "--workers"),
        ([*LINK, "--workers", "many"], 2, "--workers"),
        ([*LINK, "--scaling", "sideways"], 2, "--scaling"),
        ([], 3, "give the link, e.g. --link 10Gbit,50us"),
        (["parallel.launcher=torchrun", "parallel.cpus_per_worker=100"], 3, "two workers don't fit"),
        (["parallel.strategy=ddp", "parallel.options.communication_hook=powersgd", *LINK], 2, "communication_hook"),
        (["data.samples=10", *LINK], 2, "10 samples, fewer than the global batch of 16"),
    ],
)
def test_what_cannot_be_predicted(command, arguments, code, message):
    ended = command("predict", LAB, *arguments)
    assert ended.code == code, ended.output
    assert message in " ".join(ended.stderr.replace("│", " ").split())
    assert "Traceback" not in ended.output


def test_not_under_torchrun(command, monkeypatch):
    for name, value in outer_torchrun().items():
        monkeypatch.setenv(name, value)
    ended = command("predict", LAB, *LINK)
    assert ended.code == 2
    assert "without torchrun" in ended.stderr
