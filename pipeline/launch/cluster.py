"""Ray, local or a cluster: the connection, what its nodes have, how many workers fit, and the code for them."""

import importlib.util
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from pydantic import ValidationError
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.errors import PipelineError, ResourceError, UsageError
from pipeline.experiment.schema import Parallel
from pipeline.experiment.targets import BUILT_IN, allowed_packages, project_file
from pipeline.launch.node_facts import INSTALL_SAME_COMMIT, NodeFacts, facts_here
from pipeline.plan import resources
from pipeline.plan.resources import Resources
from pipeline.protocol.trial import Trial
from pipeline.system import environment, own_signals
from pipeline.wording import counted, first_line, last_line

_SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # Ray Train asks whether its workers have ended; by default every 2 s
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # would print twice what user code prints
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # workers stay in the folder that the experiment's relative paths refer to
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # default of later releases, of which Ray 2.54 warns on stderr
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's default of 15 would make its workers slower than torchrun's on a busy machine
    "RAY_enable_worker_prestart": "0",  # would start processes that are not needed
}
_OBJECT_STORE_BYTES = 200_000_000  # events go over the channel and data is loaded by the workers
_REACH_S, _PROBE_S, _POLL_S = 10.0, 1.0, 0.2
_DEATH_NOTICE_S = 60.0  # Ray's own checks take 15 s to notice a dead node, and longer if packets are dropped
_BRIEF_S = 5.0  # resources of workers that have just ended become free one by one
_ROUNDING = 1e-6  # fractions that other jobs use
_ANSWER_S = 60.0  # Ray starts a process for a node's answer
_GPU_NAME = "accelerator_type:"  # resource of a node with GPUs
_NODE_TYPE = "ray.io/node-group"  # label of nodes that KubeRay or an autoscaler manages
_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray's jobs API for the driver that it starts, sent along with its code
_NOT_CODE = [".env", "/.git", "/.venv", "/venv", "/runs", "/mlruns", "/mlflow.db*"]  # besides what .gitignore names


@contextmanager
def connected(address: str | None, *, verbose: bool, runtime_env: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Connect to the cluster at an address, or start a local Ray (None) that ends with the calling thread."""
    options: dict[str, Any] = {"address": address, "runtime_env": dict(runtime_env or {})}
    if address is None:
        options = {"address": "local", "include_dashboard": False, "num_cpus": resources.detect().cpus}
        options["object_store_memory"] = _OBJECT_STORE_BYTES
    level = logging.INFO if verbose else logging.ERROR
    logging.getLogger("ray").setLevel(level)
    for name in ("ray.train", "ray.tune"):  # errors are raised as exceptions, or passed to callbacks, too
        logging.getLogger(name).setLevel(logging.INFO if verbose else logging.CRITICAL)
    # Ray turns its token authentication on and redirects breakpoint(), both by setting variables in this process.
    kept = {name: os.environ.get(name) for name in ("RAY_AUTH_MODE", "PYTHONBREAKPOINT")}
    with environment(**_SETTINGS, **kept), own_signals(), redirect_stdout(sys.stderr):  # Ray prints to stdout
        try:
            if address is not None:
                _check_address(address)
            with own_signals():  # otherwise Ray would handle SIGTERM for the rest of the run
                ray.init(log_to_driver=verbose, logging_level=level, configure_logging=verbose, **options)
        except Exception as error:  # Ray raises bare ones, too
            told = error if isinstance(error, PipelineError) else ResourceError(_refusal(address, error))
            if address is not None and os.environ.get("RAY_ADDRESS") == address:  # perhaps left from an earlier session
                told.add_note(f"RAY_ADDRESS={address} names this cluster. Without it, a local Ray is started.")
            raise told from error
        try:
            yield
        finally:
            ray.shutdown()


def _check_address(address: str) -> None:
    if address.startswith(("http://", "https://")):
        raise UsageError(
            f"{address} is the address of a dashboard. To join a cluster, use HOST:6379. To send a run to a dashboard, "
            "use ray job submit."
        )
    if address.startswith("ray://"):
        raise UsageError(
            f"{address}: Ray Client is not supported. Send the run with ray job submit --address http://HOST:8265, "
            "or start it on a node of the cluster with HOST:6379."
        )
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():  # not such as "auto"
        try:  # Ray would retry for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
        except OSError as error:
            what = f"no Ray cluster answers at {address}: {error.strerror or error}"
            raise ResourceError(f"{what}. Check the address, and that Ray runs there.") from error
        _check_is_node(address)


def _check_is_node(address: str) -> None:
    """Refuse a machine that has joined no cluster: Ray would abort this process there."""
    here = {each.address for those in psutil.net_if_addrs().values() for each in those}
    running = (process.info for process in psutil.process_iter(["name", "cmdline"]))
    nodes = (info["cmdline"] or [] for info in running if info["name"] == "raylet")
    if not any(part.partition("=")[2] in here for command in nodes for part in command):
        raise ResourceError(
            f"this machine is not a node of the Ray cluster at {address}. Add it with ray start --address={address} "
            "--num-cpus=0, or send the run with ray job submit."
        )


def _refusal(address: str | None, error: Exception) -> str:
    said = " ".join(str(error).split())
    if address is None:
        remedy = ". Set TMPDIR to a shorter path." if "AF_UNIX path length" in said else ""
        return f"a local Ray could not be started: {first_line(error)}{remedy}"
    if "Version mismatch" in said:  # Ray has no type for it; its message has a line for each version
        return f"{address}: {said}. Use the same Python and Ray on all machines."
    if "Package size" in said:
        size = said.partition(". ")[0]
        return f"{_project()}: the code can't be sent to the cluster: {size}. Name data in .gitignore or .rayignore."
    return f"no Ray cluster answers at {address}: {first_line(error)}"


class LocalRay:
    """A local Ray that starts while torch is imported, in a thread that holds it: it ends with the thread."""

    begun: "LocalRay | None" = None  # by this process, and not ended

    def __init__(self, *, verbose: bool) -> None:
        self._thread, self._ray = ThreadPoolExecutor(1, "local-ray"), connected(None, verbose=verbose)
        self._start = self._thread.submit(self._ray.__enter__)
        LocalRay.begun = self

    def __enter__(self) -> None:
        try:
            self._start.result()
        except BaseException:  # it can't start, or Ctrl-C
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        """End it if it hasn't ended, and wait for that."""
        if LocalRay.begun is self:
            LocalRay.begun = None
            if self._start.exception() is None:
                self._thread.submit(self._ray.__exit__, None, None, None).result()
            self._thread.shutdown()


def outside_main_thread(
    call: Callable[[], object], *, name: str, interrupt: Callable[[], object] = lambda: None, patience_s: float = 0.0
) -> BaseException | None:
    """Call a function of Ray in a thread and return its error: in the main one Ray would take over Ctrl-C.

    At Ctrl-C, ``interrupt`` is called, and the thread has ``patience_s`` to end, before it is raised.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - returned to the main thread
            errors.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_POLL_S)  # a signal is handled between two of these
    except BaseException:
        interrupt()
        thread.join(patience_s)
        raise
    return errors[0] if errors else None


def find_resources(address: str, parallel: Parallel) -> Resources:
    """Return the resources of the nodes large enough for a worker; with ``device: auto`` of those with GPUs, if any."""
    with connected(address, verbose=False):
        records, free, is_autoscaled = reachable_nodes(), ray.available_resources(), has_autoscaler()
    least = {"CPU": float(parallel.cpus_per_worker or 1)} | ({"GPU": 1.0} if parallel.device == "cuda" else {})
    able = [record for record in records if count_fitting(record["Resources"], least)]
    with_gpus = [record for record in able if record["Resources"].get("GPU", 0) >= 1]
    able = with_gpus if with_gpus and parallel.device == "auto" else able
    if not able and not is_autoscaled:
        there = "; ".join(f"{name_of(record)} has {_in_words(least, record['Resources'])}" for record in records)
        raise ResourceError(f"no node of the Ray cluster is large enough for a worker with {_in_words(least)}: {there}")
    total = {name: int(sum(record["Resources"].get(name, 0) for record in able)) for name in ("CPU", "GPU", "memory")}
    names = (name for record in able for name in record["Resources"] if name.startswith(_GPU_NAME))
    gpu = next(names, "GPU").removeprefix(_GPU_NAME)
    return Resources(
        cpus=total["CPU"],
        memory_mb=total["memory"] // 2**20,
        gpus=(gpu,) * total["GPU"],
        node=f"Ray cluster at {address}",
        nodes=max(1, len(able)),  # also before an autoscaler has started any
        is_autoscaled=is_autoscaled,
        idle=({name: min(free.get(name, 0.0), total[name]) for name in ("CPU", "GPU")},),
    )


def has_autoscaler() -> bool:
    """Return True if nodes may be added: an autoscaler or KubeRay manages some of them."""
    return any(_NODE_TYPE in record.get("Labels", {}) for record in ray.nodes())


def name_of(record: Mapping[str, Any]) -> str:
    """Return the host name and address of one of Ray's node records, for messages."""
    return f"{record['NodeManagerHostname']} ({record['NodeManagerAddress']})"


def reachable_nodes() -> list[dict[str, Any]]:
    """Return Ray's records of the living nodes to which this machine can connect, as to start workers there."""
    return [record for record in ray.nodes() if record["Alive"] and _is_reachable(record)]


def _is_reachable(record: Mapping[str, Any]) -> bool:
    with suppress(OSError):
        address = (record["NodeManagerAddress"], record["NodeManagerPort"])
        socket.create_connection(address, timeout=_PROBE_S).close()
        return True
    return False


def count_room(trial: Trial, *, running: int | None = None) -> int:
    """Return how many of a trial's workers fit on the cluster's nodes, each on a single node.

    With ``running``, the number of workers that run now, what other jobs occupy does not count. Ray says only of the
    cluster as a whole what is free: it may be in parts that are too small, and then the launch waits.
    """
    amounts, most = per_worker(trial), 1 if trial.experiment.parallel.placement == "strict_spread" else sys.maxsize
    total = sum(min(count_fitting(record["Resources"], amounts), most) for record in reachable_nodes())
    return total if running is None else min(total, running + count_fitting(ray.available_resources(), amounts))


def count_fitting(there: Mapping[str, float], amounts: Mapping[str, float]) -> int:
    """Return the number of workers that fit into these resources, if each needs these amounts."""
    return int(min((there.get(name, 0.0) + _ROUNDING) // amount for name, amount in amounts.items()))


def per_worker(trial: Trial) -> dict[str, float]:
    """Return the Ray resources that each worker of a trial occupies."""
    amounts: dict[str, float] = {"CPU": trial.cpus_per_worker}
    return amounts | ({"GPU": trial.devices_per_worker} if trial.device == "cuda" else {})


def asked_for(trial: Trial) -> str:
    """Return a trial's workers and their resources in words."""
    return f"{counted(trial.workers, 'worker')} with {_in_words(per_worker(trial))} each"


def _in_words(names: Mapping[str, float], there: Mapping[str, float] | None = None) -> str:
    """Return amounts in words: these, or what there is of the same resources."""
    return ", ".join(f"{(names if there is None else there).get(name, 0):g} {name}" for name in names)


def await_room(trial: Trial, *, may_come: bool, warn: Callable[[str], None]) -> None:
    """Wait until dead nodes are noticed, and a moment for room; refuse what never fits, unless nodes ``may_come``."""
    start, patience_s = time.monotonic(), trial.experiment.parallel.start_timeout_s
    while not all(_is_reachable(record) for record in ray.nodes() if record["Alive"]):
        if time.monotonic() - start > min(patience_s, _DEATH_NOTICE_S):
            break
        time.sleep(_POLL_S)
    start = time.monotonic()
    while (fit := count_room(trial, running=0)) < trial.workers:
        there = _in_words(per_worker(trial), ray.cluster_resources())
        asked = f"requested {asked_for(trial)}. The Ray cluster has {there}"
        if not may_come and (total := count_room(trial)) < trial.workers:
            raise ResourceError(f"{asked}. Its nodes have room for {counted(total, 'worker')}.")
        if time.monotonic() - start > min(patience_s, _BRIEF_S):
            room = f"Room for {counted(fit, 'worker')} is free now."
            warn(f"waiting up to {patience_s:g} s (parallel.start_timeout_s): {asked}. {room}")
            return
        time.sleep(_POLL_S)


def ask_nodes(*, timeout_s: float = _ANSWER_S) -> tuple[list[NodeFacts], dict[str, str]]:
    """Return the facts of the living nodes, ordered by address, and why others, by name, gave none."""
    records = {record["NodeID"]: record for record in ray.nodes() if record["Alive"]}
    ask = ray.remote(lambda: facts_here(all_gpus=True).model_dump_json())
    tasks = {}
    for node in records:
        place = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        tasks[node] = ask.options(num_cpus=0, max_retries=0, scheduling_strategy=place).remote()
    in_time, _ = ray.wait([*tasks.values()], num_returns=len(tasks), timeout=timeout_s)
    facts, silent = [], {}
    for node, task in tasks.items():
        name, place = name_of(records[node]), {"address": records[node]["NodeManagerAddress"]}
        if task not in in_time:
            silent[name] = f"it didn't answer within {timeout_s:g} s. Read Ray's logs there, or restart Ray."
            ray.cancel(task, force=True)
            continue
        try:
            facts.append(NodeFacts.model_validate_json(ray.get(task)).model_copy(update=place))
        except (RayError, ValidationError) as error:  # also where this package is missing, or has another version
            silent[name] = f"{last_line(error)}. If ddp-pipeline differs there, {INSTALL_SAME_COMMIT}"
    return sorted(facts, key=lambda node: str(node.address)), silent


def code_for_nodes() -> dict[str, Any]:
    """Return Ray's ``runtime_env`` that sends the project's folder to the nodes; empty if there is nothing to send."""
    if "working_dir" in os.environ.get(_JOB, "") or not any(_own_packages()):
        return {}
    return {"working_dir": str(_project()), "excludes": _NOT_CODE}


def import_paths(*, is_sent: bool) -> tuple[str, ...]:
    """Return the folders that the project's own packages need on ``sys.path``; relative to the folder if it is sent."""
    found = [spec for spec in map(importlib.util.find_spec, _own_packages()) if spec is not None]
    places = [Path(each).resolve() for spec in found for each in spec.submodule_search_locations or [spec.origin or ""]]
    project = _project().resolve()
    base = Path() if is_sent else project
    roots = (str(base / place.parent.relative_to(project)) for place in places if place.is_relative_to(project))
    return tuple(dict.fromkeys(roots))


def _own_packages() -> Iterator[str]:
    return (name.partition(".")[0] for name in allowed_packages() if name not in BUILT_IN)


def _project() -> Path:
    """Return the folder of the nearest pyproject.toml with ``[tool.pipeline]``, or else the working directory."""
    file = project_file()
    return file.parent if file else Path.cwd()
