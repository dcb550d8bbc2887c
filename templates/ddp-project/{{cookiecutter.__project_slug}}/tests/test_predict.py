{% if cookiecutter.task == "finetune" -%}
"""Answers of the trained model for new data."""

from pipeline import RunResult, Trained

from {{ cookiecutter.__package_name }}.data import CLASSES
from {{ cookiecutter.__package_name }}.predict import predict


def test_texts_have_a_class(trained: RunResult) -> None:
    answers = predict(Trained.load(trained.folder), ["The debugger stops.", "A method of strings that returns a copy."])

    assert len(answers) == 2
    for name, probability in answers:
        assert name in CLASSES
        assert 0 < probability <= 1
{%- elif cookiecutter.task == "gan" -%}
"""Images of the trained generator."""

from pipeline import RunResult, Trained

from {{ cookiecutter.__package_name }}.predict import predict


def test_images_are_generated(trained: RunResult) -> None:
    generator = Trained.load(trained.folder)
    picture = predict(generator, rows=2)

    assert picture.size == (8 * 32, 2 * 32)
    assert picture.tobytes() == predict(generator, rows=2).tobytes()
    assert picture.tobytes() != predict(generator, rows=2, seed=1).tobytes()


def test_a_picture_follows_each_evaluation(trained: RunResult) -> None:
    assert list((trained.folder / "samples").glob("generated-*.png"))
{%- elif cookiecutter.task == "contrastive" -%}
"""Similar images by the features of the trained encoder."""

import pytest
from PIL import Image
from pipeline import RunResult, Trained

from {{ cookiecutter.__package_name }}.predict import predict


def test_an_image_is_most_similar_to_its_copy(trained: RunResult) -> None:
    images = [Image.linear_gradient("L"), Image.radial_gradient("L"), Image.linear_gradient("L")]

    answers = predict(Trained.load(trained.folder), images)

    assert [other for other, _ in answers][::2] == [2, 0]
    assert answers[0][1] == pytest.approx(1, abs=1e-5)


def test_one_image_is_refused(trained: RunResult) -> None:
    with pytest.raises(ValueError, match="name two or more"):
        predict(Trained.load(trained.folder), [Image.new("L", (8, 8))])
{%- else -%}
"""Answers of the trained model for new data."""

{% if cookiecutter.data.startswith("table") -%}
{% if cookiecutter.data == "table" -%}
import math
{% endif -%}
from pathlib import Path

{% endif -%}
{% if cookiecutter.data.startswith("table") -%}
import pytest
{% elif cookiecutter.data != "text" -%}
from PIL import Image
{% endif -%}
from pipeline import RunResult, Trained

{% if cookiecutter.data.startswith("table") -%}
from {{ cookiecutter.__package_name }}.data import {{ "CLASSES, " if cookiecutter.data == "table_classes" }}COLUMNS
{% elif cookiecutter.data != "text" and cookiecutter.data != "image_folder" -%}
from {{ cookiecutter.__package_name }}.data import CLASSES
{% endif -%}
from {{ cookiecutter.__package_name }}.predict import predict


{% if cookiecutter.data.startswith("table") -%}
def test_a_row_without_its_target(trained: RunResult, tmp_path: Path) -> None:
    rows = tmp_path / "new.csv"
    means = [str(mean) for mean, _ in COLUMNS.values()]
    rows.write_text("\n".join([",".join(COLUMNS), ",".join(means)]))

    answers = predict(Trained.load(trained.folder), rows)

    assert len(answers) == 1
{%- if cookiecutter.data == "table" %}
    assert all(map(math.isfinite, answers[0]))
{%- else %}
    name, probability = answers[0]
    assert name in CLASSES
    assert 0 < probability <= 1
{%- endif %}


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
    images = [Image.new("RGB", (50, 40), color) for color in ("black", "orange")]

    answers = predict(Trained.load(trained.folder), images)

    assert len(answers) == 2
    for name, probability in answers:
        assert name in {{ 'Trained.load(trained.folder).experiment.arguments("data")["classes"]' if cookiecutter.data == "image_folder" else "CLASSES" }}
        assert 0 < probability <= 1
{%- endif %}
{%- endif %}
