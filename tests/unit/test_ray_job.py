"""What Ray's job client raises becomes a message, and Ray's own commands for a job can be pasted."""

import pytest
import requests
from ray.exceptions import AuthenticationError

from pipeline.commands.submit import ray_job
from pipeline.errors import ResourceError

URL = "http://head:8265"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (AuthenticationError("Authentication required: no token\n\nmore"), "required: no token. Set RAY_AUTH_MODE=tok"),
        (requests.ConnectionError("pool: refused"), f"no Ray cluster answers at {URL}: refused"),
        (ConnectionError("it is gone"), f"no Ray cluster answers at {URL}: it is gone"),
        (RuntimeError("Request failed with status code 500: x\nmore"), "answered: Request failed with status code 500"),
    ],
)
def test_an_error_of_rays_client_is_explained(error: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def get_address() -> str:
        raise error

    monkeypatch.setattr(ray_job, "_check_reachable", lambda _: None)
    monkeypatch.setattr(ray_job, "JobSubmissionClient", lambda _: get_address())
    with pytest.raises(ResourceError, match=said):
        ray_job.connect(URL)


@pytest.mark.parametrize(
    ("variables", "ray"),
    [
        ({}, "ray"),
        ({"RAY_ADDRESS": f"{URL}/"}, "ray"),
        ({"RAY_ADDRESS": "10.0.0.1:6379"}, "env -u RAY_ADDRESS ray"),
    ],
)
def test_commands_for_a_job_use_its_cluster(
    variables: dict[str, str], ray: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray prefers these variables to ``--address``."""
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert list(ray_job.commands_for("lab-1", url=URL)) == [
        f"{ray} job logs lab-1 --follow --address {URL}",
        f"{ray} job status lab-1 --address {URL}",
        f"{ray} job stop lab-1 --address {URL}",
    ]
