"""Which rank's error is shown."""

import pytest

from pipeline import blame
from pipeline.contract import Rank
from pipeline.errors import ExperimentError, Problem, TrainingError
from pipeline.events import Failed

BY_PEER = "RuntimeError: [pair.cc:547] Connection closed by peer [127.0.0.1]:51423"
KILLED = "killed by SIGKILL (out of memory?)"


def failed(rank: int, error: str, *, world_size: int = 2, problems: tuple[Problem, ...] = ()) -> Failed:
    where = Rank(rank=rank, world_size=world_size, node=f"node-{rank}")
    traceback = "" if problems else f"traceback of rank {rank}"
    return Failed(time=0.0, rank=where, error=error, traceback=traceback, problems=problems)


def test_the_first_that_failed_by_itself_is_to_blame() -> None:
    error = blame.cause([failed(1, "ValueError: mine"), failed(0, "KeyError: later")], {})
    assert isinstance(error, TrainingError)
    assert (str(error), error.details) == ("rank 1 on node-1: ValueError: mine", "traceback of rank 1")


@pytest.mark.parametrize(
    "collateral",
    [
        BY_PEER,
        "torch.distributed.DistBackendError: NCCL error",
        "DistNetworkError: Failed to recv",
        "RuntimeError: [unbound_buffer.cc:81] Timed out waiting 30000ms for recv operation to complete",
        "BrokenPipeError: [Errno 32] Broken pipe",
    ],
)
def test_those_that_only_lost_another_rank_are_not(collateral: str) -> None:
    own = failed(1, "ValueError: mine")
    assert str(blame.cause([failed(0, collateral), own], {})) == "rank 1 on node-1: ValueError: mine"
    assert str(blame.cause([failed(0, collateral)], {1: KILLED})) == f"rank 1 ended without a word: {KILLED}"


def test_a_rank_that_reported_did_not_end_without_a_word() -> None:
    losses = {0: "ended with exit code 1", 1: "ended with exit code 1"}
    error = blame.cause([failed(0, BY_PEER), failed(1, "ValueError: mine")], losses)
    assert str(error) == "rank 1 on node-1: ValueError: mine"


def test_an_own_error_is_more_than_a_loss() -> None:
    """The launcher kills the others once one has failed."""
    error = blame.cause([failed(0, "ValueError: mine")], {0: "ended with exit code 1", 1: "killed by SIGTERM"})
    assert str(error) == "rank 0 on node-0: ValueError: mine"


def test_all_that_ended_without_a_word_are_named() -> None:
    error = blame.cause([], {0: KILLED, 3: "ended with exit code 7"})
    assert str(error) == f"rank 0 ended without a word: {KILLED}\nrank 3 ended without a word: ended with exit code 7"


def test_if_all_lost_each_other_the_first_is_shown() -> None:
    error = blame.cause([failed(1, BY_PEER), failed(0, BY_PEER)], {})
    assert str(error) == f"rank 1 on node-1: {BY_PEER}"


def test_nobody_said_anything() -> None:
    assert str(blame.cause([], {})) == "the workers ended without a result; their logs are in the run's folder"


def test_a_single_process_needs_no_rank() -> None:
    assert str(blame.cause([failed(0, "ValueError: mine", world_size=1)], {})) == "ValueError: mine"


def test_a_mistake_in_the_experiment_is_no_training_error() -> None:
    problems = (Problem("model", "wrong"),)
    error = blame.cause([failed(1, "model: wrong", problems=problems)], {1: "ended with exit code 1"})
    assert isinstance(error, ExperimentError)
    assert error.problems == problems


def test_who_waited_in_vain_may_know_of_a_hang() -> None:
    assert blame.waited_in_vain(failed(0, "RuntimeError: Timed out waiting 5000ms for recv operation to complete"))
    assert blame.waited_in_vain(failed(0, "DistBackendError: Watchdog caught collective operation timeout: WorkNCCL"))
    assert not blame.waited_in_vain(failed(0, BY_PEER))
    assert not blame.waited_in_vain(failed(0, "ValueError: mine"))


def test_a_lost_rank_is_named_with_its_node_where_there_are_several() -> None:
    assert str(blame.cause([], {1: KILLED}, nodes=["a", "b"])) == f"rank 1 on b ended without a word: {KILLED}"
    assert str(blame.cause([], {1: KILLED}, nodes=["a", "a"])) == f"rank 1 ended without a word: {KILLED}"
