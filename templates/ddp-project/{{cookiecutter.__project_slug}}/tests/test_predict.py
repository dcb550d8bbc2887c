"""Predictions of the trained model for new data."""

{% if cookiecutter.data == "table" -%}
import math
from pathlib import Path

import pytest
{% elif cookiecutter.data != "text" -%}
from PIL import Image
{% endif -%}
from pipeline import RunResult, Trained

{% if cookiecutter.data == "table" -%}
from {{ cookiecutter.__package_name }}.data import COLUMNS
{% endif -%}
from {{ cookiecutter.__package_name }}.predict import predict


{% if cookiecutter.data == "table" -%}
def test_a_row_without_its_target(trained: RunResult, tmp_path: Path) -> None:
    rows = tmp_path / "new.csv"
    means = [str(mean) for mean, _ in COLUMNS.values()]
    rows.write_text("\n".join([",".join(COLUMNS), ",".join(means)]))
    ((target,),) = predict(Trained.load(trained.folder), rows)

    assert math.isfinite(target)


def test_an_empty_value_is_named(trained: RunResult, tmp_path: Path) -> None:
    rows = tmp_path / "new.csv"
    rows.write_text("\n".join([",".join(COLUMNS), "," * (len(COLUMNS) - 1)]))

    with pytest.raises(ValueError, match=r"new\.csv:2: \w+ is '', not a number"):
        predict(Trained.load(trained.folder), rows)
{%- elif cookiecutter.data == "text" -%}
def test_a_text_goes_on(trained: RunResult) -> None:
    model = Trained.load(trained.folder)

    assert len(predict(model, "The ", characters=100)) == 100
    assert predict(model, "The ", characters=9, seed=1) == predict(model, "The ", characters=9, seed=1)
{%- else -%}
def test_an_image_of_any_size_has_a_class(trained: RunResult) -> None:
    name, probability = predict(Trained.load(trained.folder), Image.new("RGB", (50, 40), "orange"))

    assert name
    assert 0 < probability <= 1
{%- endif %}
