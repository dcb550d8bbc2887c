"""Wishes for a study that can't be met."""

from typing import Any

import pytest


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compare", "lab.yaml"], "compare takes at least two experiment files, or --vary"),
        (["compare", "lab.yaml", "--vary", "optimizer.lr=0.1"], "optimizer.lr has 1 value"),
        (["compare", "lab.yaml", "lab.yaml"], "lab.yaml is named twice"),
        (["compare", "lab.yaml", "latest"], "latest is neither an experiment file nor an override"),
        (["compare", "nothing.yaml", "lab.yaml"], "nothing.yaml: there is no such file"),
        (["compare", "latest", "--seeds", "3"], "--seeds trains experiment files. No file is named, only: latest"),
        (["compare", "latest", "--dry-run"], "--dry-run trains experiment files"),
        (["compare", "lab.yaml", "--vary", "train.epochs=1,2", "--seeds", "1"], "--seeds 1: a single pair has no"),
        (["compare", "lab.yaml", "--vary", "train.epochs=1,2", "--at-most", "9"], "--at-most limits --until-clear"),
        (
            ["compare", "lab.yaml", "--vary", "train.epochs=1,2", "--until-clear", "--at-most", "3"],
            "--at-most 3: less than --seeds 5",
        ),
        (["compare", "lab.yaml", "--vary", "train.epochs=1,2", "--target", "high"], "--target high: write a value of"),
        (["compare", "lab.yaml", "--vary", "train.epochs=1,2", "--resume"], "has no study of "),
        (["compare", "lab.yaml", "--vary", "train.epochs='1,2"], "No closing quotation"),
        (["compare", "lab.yaml", "--vary", "train.epochs=1,2 train.epochs=3"], "train.epochs is named twice"),
        (["compare", "lab.yaml", "--vary", "train.epochs=1,"], "write key=value,value"),
        (["compare", "lab.yaml", "--vary", "train.epochs=1,2", "--dry-run", "--json"], "--dry-run prints the plan"),
        (["compare", "lab.yaml", "--vary", "tracking.uri=sqlite:///a.db,sqlite:///b.db"], "different tracking.uri"),
    ],
)
def test_bad_wishes(command: Any, words: list[str], message: str) -> None:
    ended = command(*words)
    assert ended.code == 2, ended.output
    assert message in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.output
