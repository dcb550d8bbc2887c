"""``tracking.register_model``, ``run_name`` and ``tags``: their forms, their mistakes, and what a plan says of them."""

# promise: `tracking.register_model`: one version for each finished run, and its alias

from typing import Any

import pytest
import toys

from pipeline.commands.doctor import find_store
from pipeline.errors import ExperimentError
from pipeline.experiment import uris
from pipeline.experiment.consistency import OWN_TAGS, contradictions
from pipeline.experiment.load import from_mapping, to_yaml
from pipeline.plan.plan import DataSizes, describe, make_plan
from pipeline.plan.resources import Resources
from pipeline.protocol.events import ModelSaved
from pipeline.record import provenance


def tracked(**tracking: Any) -> Any:
    return toys.experiment(parallel={"launcher": "inprocess"}, tracking=tracking)


def problems(**tracking: Any) -> str:
    with pytest.raises(ExperimentError) as caught:
        from_mapping({**toys.experiment().model_dump(mode="json"), "tracking": tracking})
    return str(caught.value)


def test_the_address_is_that_of_the_file_then_of_the_variable_and_the_plan_says_which(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def plan(**tracking: Any) -> str:
        whole = toys.experiment(parallel={"launcher": "inprocess"}).model_dump(mode="json") | {"tracking": tracking}
        made = make_plan(from_mapping(whole).experiment, Resources(cpus=2, memory_mb=4096), with_baseline=False)
        text = describe(made, DataSizes(22, 10, 3))
        return " ".join(line for line in text.splitlines() if line.startswith("tracking"))

    monkeypatch.delenv(uris.TRACKING_VARIABLE, raising=False)
    assert plan() == "tracking: sqlite:///mlflow.db tracking_from: default"
    monkeypatch.setenv(uris.TRACKING_VARIABLE, "http://me:secret@there:5000")
    assert plan() == plan(log_model=False) == "tracking: http://there:5000 tracking_from: MLFLOW_TRACKING_URI"
    assert plan(uri="sqlite:///mine.db") == "tracking: sqlite:///mine.db tracking_from: tracking.uri"
    assert find_store(None) == "http://me:secret@there:5000"
    monkeypatch.setenv(uris.TRACKING_VARIABLE, "./mlruns")
    assert (
        "tracking.uri: not set, so MLFLOW_TRACKING_URI is used. It is ./mlruns; MLflow no longer stores" in problems()
    )


def test_a_name_alone_is_a_section_with_this_name() -> None:
    short, long = tracked(register_model="digits"), tracked(register_model={"name": "digits"})
    assert short == long
    assert short.tracking.register_model.alias is None
    assert "register_model:\n    name: digits\n    alias: null\n" in to_yaml(short)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("a/b", "tracking.register_model: is 'a/b' (a string); write"),
        ({"name": "a:b"}, "tracking.register_model.name: is 'a:b' (a string); write name of the registered model"),
        ({"name": "a", "alias": "latest"},
         "tracking.register_model.alias: is 'latest' (a string); MLflow reserves this"),
        ({"name": "a", "alias": "v3"}, "MLflow reserves this word for versions. Use another alias."),
        ({"name": "a", "alias": "the best"}, "tracking.register_model.alias: is 'the best' (a string); write alias"),
        ({"alias": "champion"}, "tracking.register_model.name: missing; "),
        (3, "tracking.register_model: is 3 (an integer); write a mapping with keys from name, alias"),
    ],
)  # fmt: skip
def test_what_mlflow_would_refuse_is_refused_at_once(given: Any, said: str) -> None:
    assert said in problems(register_model=given)


def test_a_model_that_is_not_logged_cannot_be_registered_and_the_plan_says_what_is() -> None:
    (problem,) = contradictions(tracked(register_model="digits", log_model=False))
    assert str(problem) == (
        "tracking.register_model: needs a logged model, but tracking.log_model is false. "
        "Set it to true, or remove this key."
    )
    experiment = tracked(register_model={"name": "digits", "alias": "champion"})
    text = describe(make_plan(experiment, Resources(cpus=2, memory_mb=4096), with_baseline=False), DataSizes(22, 10, 3))
    assert "registers: the trained model as a version of digits with alias champion\n" in text


def test_the_saved_model_tells_where_it_is_registered() -> None:
    _, outbox = toys.trained(tracking={"register_model": {"name": "digits", "alias": "champion"}})
    (saved,) = (event for event in outbox.events if isinstance(event, ModelSaved))
    assert (saved.registered, saved.alias) == ("digits", "champion")


@pytest.mark.parametrize("name", ["role", "mlflow.runName", "pipeline.run", "best.lr"])
def test_tags_that_are_taken(name: str) -> None:
    (problem,) = contradictions(tracked(tags={name: "mine"}))
    assert str(problem).endswith(": pipeline or MLflow sets this tag. Choose another name.")


def test_tags_are_those_of_the_run_and_never_replace_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "git", lambda *_: "")
    plan = make_plan(tracked(tags={"team": "vision"}), Resources(cpus=2, memory_mb=4096), with_baseline=False)
    tags = provenance.run_tags(plan)
    assert tags["team"] == "vision"
    assert tags.keys() - {"team"} <= OWN_TAGS
