"""A prediction from this machine's own measurements, checked by one of them."""

import json

import pytest

from pipeline.report.forecast import Forecast

LAB = "lab.yaml"


def test_the_link_is_measured_and_the_prediction_checked(command):
    ended = command(
        "predict",
        LAB,
        "parallel.strategy=ddp",
        "parallel.launcher=torchrun",
        "parallel.workers=2",
        "train.epochs=9",
        "--json",
    )
    assert ended.code == 0, ended.output
    found = Forecast.model_validate(json.loads(ended.stdout))
    assert found.link_from == "measured"
    assert found.measured_workers == 2
    assert found.link.latency_us >= 0  # 0 where load during the larger all-reduces hides what all of them share
    assert found.link.bandwidth_gbit > 0
    assert found.check is not None
    assert found.check.workers == 2
    assert found.check.measured > 0
    assert found.outlooks[0].predictions[1].speedup == pytest.approx(found.check.predicted)
    assert found.outlooks[0].worthwhile == 1  # a step of a tenth of a millisecond isn't worth sharing
