"""Private parts of Ray are used only in the releases that were tested, and only if they are as they were there."""

import pytest
import ray

from pipeline.errors import UsageError
from pipeline.launch._ray import interface
from pipeline.launch._ray.fast import driver_controller, lean_node, patching
from pipeline.launch._ray.interface import public_because
from pipeline.launch.cluster.join import connected


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "_unknown", interface._unknown.__wrapped__)


def test_ray_client_is_refused_and_the_other_ways_are_named() -> None:
    refused = r"ray://head:10001: Ray Client is not supported\. Send .* ray job submit --address .* with HOST:6379"
    with pytest.raises(UsageError, match=refused), connected("ray://head:10001", verbose=False):
        pass


def test_the_installed_release_is_started_faster() -> None:
    assert public_because() == ""


def test_the_public_interface_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_PLAIN_RAY", "1")
    assert public_because() == "PIPELINE_PLAIN_RAY is set"
    monkeypatch.setenv("PIPELINE_PLAIN_RAY", "0")
    assert public_because() == ""


def test_an_unknown_release_is_used_by_its_public_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "__version__", "2.61.0")
    assert public_because() == "Ray 2.61.0 is not tested with the faster start (tested: 2.60)"


def test_a_method_with_other_parameters_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    (group,) = [one for one in driver_controller.OVERRIDES if one.__name__ == "_WorkerGroup"]
    (base,) = group.__bases__
    monkeypatch.setattr(base, "_init_train_context_on_workers", lambda self, workers: None)
    monkeypatch.delattr(lean_node.VerboseNode.__bases__[0], "start_monitor")
    assert patching.mismatches({**driver_controller.OVERRIDES, **lean_node.OVERRIDES}) == [
        "WorkerGroup._init_train_context_on_workers",
        "Node.start_monitor",
    ]
    assert public_because().endswith(
        "differs from the tested releases (WorkerGroup._init_train_context_on_workers; Node.start_monitor)"
    )


def test_a_part_that_is_gone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: object) -> list[str]:
        raise AttributeError("module 'ray._private.services' has no attribute 'start_ray_process'")

    monkeypatch.setattr(patching, "mismatches", gone)
    assert "no attribute 'start_ray_process'" in public_because()
