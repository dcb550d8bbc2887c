"""Which nodes don't fit the machine that a run is started from."""

from pathlib import Path

import pytest

from pipeline.launch.cluster.checks import find_other_versions
from pipeline.launch.cluster.code import Code
from pipeline.launch.cluster.node_check import Answer, Question, check_node
from pipeline.launch.cluster.node_facts import NodeFacts, Torch, facts_here

HERE = facts_here()
TORCH = Torch(version="2.13.0+cpu", cuda=None, nccl=None, cuda_available=None, cuda_error=None)
DRIVER = HERE.model_copy(update={"python": "3.11.7", "torch": TORCH, "ray": "2.60.0", "pipeline": "0.1.0"})


def node(name: str, **facts: object) -> NodeFacts:
    return DRIVER.model_copy(update={"node": name, "address": "10.0.0.2", **facts})


def test_the_build_of_torch_and_the_patch_of_python_may_differ() -> None:
    cuda = TORCH.model_copy(update={"version": "2.13.0+cu130"})

    assert find_other_versions(node("gpu", torch=cuda, python="3.11.9"), here=DRIVER) == []


def test_all_that_differs_is_said_at_once() -> None:
    older = TORCH.model_copy(update={"version": "2.12.1"})

    assert find_other_versions(node("old", python="3.10.2", torch=older, pipeline=None), here=DRIVER) == [
        "it has Python 3.10, and this machine has 3.11. Use the same Python on all nodes, e.g. by one container image.",
        "it has torch 2.12.1, and this machine has 2.13.0. On that node: pip install torch==2.13.0",
        "it has no ddp-pipeline, and this machine has 0.1.0. On that node, install it from this machine's commit: "
        "pip install git+https://HOST/REPOSITORY@COMMIT",
    ]


def test_a_project_that_is_not_installed_here_is_not_asked_for_there() -> None:
    """It runs from its source folder; its version is unknown."""
    here = DRIVER.model_copy(update={"pipeline": None})
    assert find_other_versions(node("other", pipeline="0.0.9"), here=here) == []


def test_a_node_looks_where_its_worker_will(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the copy of the project that was sent: the working directory is below it."""
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "points.csv").touch()
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "sent_along.py").touch()
    monkeypatch.chdir(tmp_path)
    code = Code(folder="experiments", paths=("src",), packages=("sent_along", "left_behind"))
    data = ("points.csv", "/no/such/data")
    question = Question(code=code, data=data, token=tmp_path / "token", driver=("127.0.0.1", 1))

    answer = Answer.model_validate_json(check_node(question.model_dump_json()))

    assert answer.missing_packages == ("left_behind",)
    assert answer.missing_data == ("/no/such/data",)
    assert (
        answer.storage == "files that this machine writes there do not appear on that node: the storage is not shared"
    )


def test_storage_that_the_driver_shares_is_fine(tmp_path: Path) -> None:
    (tmp_path / "token").touch()
    question = Question(code=Code(), token=tmp_path / "token", driver=("127.0.0.1", 1))

    assert Answer.model_validate_json(check_node(question.model_dump_json())).storage is None
