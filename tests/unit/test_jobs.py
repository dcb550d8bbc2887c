"""What is made of the answers of a cluster's job server, whose client has one type of error for all of them."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobType

from pipeline.commands.submit import cluster
from pipeline.commands.submit.jobs import Job, Jobs, failure
from pipeline.errors import ResourceError, UsageError

URL = "http://head:8265"


def details(identity: str) -> JobDetails:
    return JobDetails(type=JobType.SUBMISSION, submission_id=identity, status=JobStatus.RUNNING, entrypoint="")


def jobs(monkeypatch: pytest.MonkeyPatch, *known: str, answer: str) -> Jobs:
    """A cluster that knows some jobs and answers any question about one of them with an error."""

    def get_job_info(_: str) -> Any:
        raise RuntimeError(answer)

    client = SimpleNamespace(
        get_address=lambda: URL, get_job_info=get_job_info, list_jobs=lambda: [details(each) for each in known]
    )
    monkeypatch.setattr(cluster, "connect", lambda _: client)
    return Jobs(URL)


def test_a_job_that_the_cluster_does_not_list_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"has no job lab-1; did you mean lab-2\?.*pipeline status shows all"):
        jobs(monkeypatch, "lab-2", answer="Request failed with status code 404: Job lab-1 does not exist.").job("lab-1")


def test_a_server_that_fails_has_the_job_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its number, or the text of what went wrong, has a 404 in it."""
    answer = "Request failed with status code 500: Traceback ... lab-404 ..."
    with pytest.raises(ResourceError, match="answered: Request failed with status code 500"):
        jobs(monkeypatch, "lab-404", answer=answer).job("lab-404")


def test_what_a_job_prints_is_no_reason() -> None:
    printed = "Job entrypoint command failed with exit code 1, last logs: No module named pipeline_of_mine"
    ended = Job(id="lab-1", experiment="lab", status="FAILED", exit_code=1, message=printed)
    assert failure(ended) is None
    missing = failure(ended.model_copy(update={"exit_code": 127}))
    assert "the python of the cluster's head has no pipeline" in str(missing)


def test_only_a_head_without_an_agent_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.time, "sleep", lambda _: None)
    answers = ["Request failed with status code 500: No available agent to submit job, please try again later.", ""]
    asked: list[str] = []

    def submit(*, name: str) -> None:
        asked.append(name)
        if answer := answers.pop(0):
            raise RuntimeError(answer)

    cluster.once_ready(submit, name="lab-1")
    assert asked == ["lab-1", "lab-1"]
    answers[:] = ["Request failed with status code 400: a variable says No available agent"]
    with pytest.raises(RuntimeError, match="status code 400"):
        cluster.once_ready(submit, name="lab-1")


@pytest.mark.parametrize(("token", "said"), [("", "requires a token"), ("x" * 32, "rejects the token")])
def test_a_token_is_refused_only_if_one_was_sent(monkeypatch: pytest.MonkeyPatch, token: str, said: str) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    for name in ("RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ResourceError, match=said), cluster.explained(URL):
        raise AuthenticationError("no")
