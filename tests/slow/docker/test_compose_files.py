"""The compose files are valid, closed to the outside, and ask for secrets. Nothing is built or started."""

import re
import stat
import subprocess
from pathlib import Path

import pytest
from containers import ROOT, config, create_env, has_compose, refusal

SECRETS = (
    "POSTGRES_PASSWORD",
    "MLFLOW_ADMIN_PASSWORD",
    "MLFLOW_FLASK_SERVER_SECRET_KEY",
    "MLFLOW_CRYPTO_KEK_PASSPHRASE",
    "RAY_AUTH_TOKEN",
)


@pytest.fixture(scope="module")
def compose() -> None:
    if not has_compose():
        pytest.skip("there is no docker command with compose here")


@pytest.fixture
def env(tmp_path: Path) -> Path:
    path = tmp_path / ".env"
    create_env(path)
    return path


@pytest.mark.parametrize("files", [("compose.yaml",), ("compose.yaml", "compose.gpu.yaml")], ids=["cpu", "gpu"])
def test_files_are_valid(files: tuple[str, ...], env: Path, compose: None) -> None:
    assert set(config(*files, env=env)["services"]) == {"postgres", "mlflow", "ray-head", "ray-worker"}


def test_services_are_closed(env: Path, compose: None) -> None:
    whole = config("compose.yaml", env=env)
    for service in whole["services"].values():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["mem_limit"]
        assert service["pids_limit"]
    ports = [port for service in whole["services"].values() for port in service.get("ports", [])]
    assert {port["target"] for port in ports} == {5000, 8265}
    assert {port["host_ip"] for port in ports} == {"127.0.0.1"}
    assert whole["networks"]["cluster"]["internal"]
    assert [
        name for name in ("postgres", "ray-worker") if set(whole["services"][name]["networks"]) != {"cluster"}
    ] == []


@pytest.mark.parametrize("name", SECRETS)
def test_nothing_starts_without_a_secret(name: str, env: Path, compose: None) -> None:
    env.write_text("".join(line for line in env.read_text().splitlines(keepends=True) if not line.startswith(name)))
    said = refusal(env=env)
    assert name in said
    assert "run make cluster-env" in said


def test_secrets_are_random_and_for_their_owner_only(tmp_path: Path) -> None:
    first, second = create_env(tmp_path / "first"), create_env(tmp_path / "second")
    assert set(first) == set(SECRETS)
    values = [*first.values(), *second.values()]
    assert len(set(values)) == 2 * len(SECRETS)
    assert {len(value) for value in values} == {48}
    assert stat.S_IMODE((tmp_path / "first").stat().st_mode) == 0o600


def test_secrets_that_are_there_stay(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_text("# mine\nRAY_AUTH_TOKEN=mine\n")
    assert create_env(path) == {"RAY_AUTH_TOKEN": "mine"}


def test_secrets_stay_out_of_git_and_images() -> None:
    ignored = subprocess.run(["git", "check-ignore", "--quiet", "docker/.env"], cwd=ROOT, check=False)
    assert ignored.returncode == 0
    patterns = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in patterns
    assert [p for p in patterns if p.startswith("!docker") and p.endswith(("docker", "*", ".env"))] == []


def test_what_images_install_is_pinned() -> None:
    pins = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    named = re.findall(r"pip install '(mlflow)\[auth\]' ([\w-]+) ", dockerfile)[0]
    assert "PIP_CONSTRAINT=/src/constraints.txt" in dockerfile
    assert {"pip", *named} - pins == set()
