"""Which rank's error is shown."""

import pytest

from pipeline.errors import ExperimentError, Problem, TrainingError
from pipeline.protocol import failures
from pipeline.protocol.events import Failed, Origin, event_from_json
from pipeline.protocol.trial import Rank

BY_PEER = "RuntimeError: [pair.cc:547] Connection closed by peer [127.0.0.1]:51423"
OWN = "ConnectionResetError: [Errno 104] Connection reset by peer"
KILLED = "killed by SIGKILL (out of memory?)"


def failed(
    rank: int, error: str, *, origin: Origin = "rank", world_size: int = 2, problems: tuple[Problem, ...] = ()
) -> Failed:
    where = Rank(rank=rank, world_size=world_size, node=f"node-{rank}")
    traceback = "" if problems else f"traceback of rank {rank}"
    return Failed(time=0.0, rank=where, error=error, traceback=traceback, problems=problems, origin=origin)


def lost(rank: int) -> Failed:
    return failed(rank, BY_PEER, origin="lost_peer")


def test_the_first_that_failed_by_itself_is_to_blame() -> None:
    error = failures.cause([failed(1, "ValueError: mine"), failed(0, "KeyError: later")], {})
    assert isinstance(error, TrainingError)
    assert (str(error), error.details) == ("rank 1 on node-1: ValueError: mine", "traceback of rank 1")


@pytest.mark.parametrize("origin", ["lost_peer", "peer_timeout"])
def test_those_that_only_lost_another_rank_are_not(origin: Origin) -> None:
    own, collateral = failed(1, "ValueError: mine"), failed(0, "whatever it says", origin=origin)
    assert str(failures.cause([collateral, own], {})) == "rank 1 on node-1: ValueError: mine"
    assert str(failures.cause([collateral], {1: KILLED})) == f"rank 1 ended without a word: {KILLED}"


def test_a_rank_that_lost_a_connection_of_its_own_is_no_lost_worker() -> None:
    both = {0: "ended with exit code 1", 1: "ended with exit code 1"}
    assert failures.only_lost_workers([lost(0)], both)
    assert not failures.only_lost_workers([lost(0), failed(1, OWN)], both)
    assert str(failures.cause([lost(0), failed(1, OWN)], both)) == f"rank 1 on node-1: {OWN}"


def test_failures_of_journals_before_are_read() -> None:
    line = lost(0).model_dump_json(exclude={"origin"})
    assert event_from_json(line) == failed(0, BY_PEER)


def test_a_rank_that_reported_did_not_end_without_a_word() -> None:
    losses = {0: "ended with exit code 1", 1: "ended with exit code 1"}
    error = failures.cause([lost(0), failed(1, "ValueError: mine")], losses)
    assert str(error) == "rank 1 on node-1: ValueError: mine"


def test_an_own_error_is_more_than_a_loss() -> None:
    """The launcher kills the others once one has failed."""
    error = failures.cause([failed(0, "ValueError: mine")], {0: "ended with exit code 1", 1: "killed by SIGTERM"})
    assert str(error) == "rank 0 on node-0: ValueError: mine"


def test_all_that_ended_without_a_word_are_named() -> None:
    error = failures.cause([], {0: KILLED, 3: "ended with exit code 7"})
    assert str(error) == f"rank 0 ended without a word: {KILLED}\nrank 3 ended without a word: ended with exit code 7"


def test_if_all_lost_each_other_the_first_is_shown() -> None:
    error = failures.cause([lost(1), lost(0)], {})
    assert str(error) == f"rank 1 on node-1: {BY_PEER}"


def test_nobody_said_anything() -> None:
    assert str(failures.cause([], {})) == "the workers ended without a result; their logs are in the run's folder"


def test_a_single_process_needs_no_rank() -> None:
    assert str(failures.cause([failed(0, "ValueError: mine", world_size=1)], {})) == "ValueError: mine"


def test_a_mistake_in_the_experiment_is_no_training_error() -> None:
    problems = (Problem("model", "wrong"),)
    error = failures.cause([failed(1, "model: wrong", problems=problems)], {1: "ended with exit code 1"})
    assert isinstance(error, ExperimentError)
    assert error.problems == problems


def test_a_lost_rank_is_named_with_its_node_where_there_are_several() -> None:
    assert str(failures.cause([], {1: KILLED}, nodes=["a", "b"])) == f"rank 1 on b ended without a word: {KILLED}"
    assert str(failures.cause([], {1: KILLED}, nodes=["a", "a"])) == f"rank 1 ended without a word: {KILLED}"
