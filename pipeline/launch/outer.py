"""Under ``torchrun`` or ``srun`` each process is a rank, and rank 0's records, too: it trains in a thread of its own.

The processes meet in torch's key-value store. Rank 0 learns there what each of them has, the others what to train and
at last how the run ended. A rank that dies ends the job; its launcher, or a requeue, starts all of them again.
"""

import hashlib
import ipaddress
import os
import platform
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from pydantic import ValidationError

from pipeline.errors import PipelineError, ResourceError, Terminated, TrainingError, UsageError
from pipeline.experiment.schema import Experiment, Parallel
from pipeline.experiment.values import Frozen
from pipeline.launch.base import LOOPBACK, Attempt, StopRequest
from pipeline.plan.outer_launcher import OuterLauncher, outer_launcher
from pipeline.plan.plan import Plan
from pipeline.plan.resources import Placed, Resources, detect, usable_cores
from pipeline.plan.visible_gpus import visible_gpus
from pipeline.protocol.channel import Address, ChannelOutbox, DirectOutbox
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import Trial, trial_from_json
from pipeline.protocol.trial_outcome import Outcome
from pipeline.system.imports import PACKAGE, undisturbed
from pipeline.system.leftovers import abandon
from pipeline.system.signals import SAME_S, end_after, on_sigterm
from pipeline.wording import listed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_LAUNCHER = "torchrun"
"""Value of ``parallel.launcher`` for ranks that an outer launcher has started."""
_POLL_S, _LONGEST_POLL_S, _LISTEN_S = 0.1, 1.0, 0.5
_REPORT_S, _FAREWELL_S = 5.0, 5.0
"""Seconds in which a rank that can't take part tells rank 0, and in which all learn how the run ended."""
_LOSS_S, _LAST_REPORTS_S = 3.0, 10.0
"""Seconds in which other ranks end after one has failed, and in which it becomes known which one they failed for."""
_KNOWN_S = 0.5
"""Seconds in which a lost rank is noticed after its launcher has sent SIGTERM because of it."""
_SHOWN, _NAMED = 8, 3  # ranks, nodes
_DIED = "its process was killed or crashed, or its node is unreachable"


class RankFacts(Frozen):
    """Facts about a rank and its machine, as the rank itself finds them."""

    rank: int
    local_rank: int
    resources: Resources
    """Resources that this process may use; another rank of the node may use the same."""
    cores: tuple[int, ...]
    """Numbers of the cores that it may use, which tell shared from divided cores."""
    gpus: dict[str, str]
    """Names of the GPUs that it sees, by UUID."""
    address: str
    """Address of the machine that faces rank 0's."""
    versions: dict[str, str]
    """Versions that all ranks must share, by package."""


class Command(Frozen):
    """Message of rank 0 to the other ranks: a trial to work on, or the end of the run."""

    trial: str = ""
    """JSON of the trial; empty at the end of the run."""
    channel: str = ""
    """Address of the trial's inbox."""
    gpus: tuple[int | None, ...] = ()
    """`Rank.gpu` of each rank."""
    exit_code: int = 0


class Group:
    """This process's part in the group of ranks."""

    def __init__(self, outer: OuterLauncher, *, timeout_s: float) -> None:
        self.outer, self.node = outer, socket.gethostname()
        self.number = 0
        """Number of the next command."""
        self._timeout_s, self._host, self._server = timeout_s, outer.host, None
        if outer.is_driver and not outer.has_store:
            self._host = find_own_address(outer)
            self._server = self._open()
        self._store = self.connected(f"pipeline/{outer.attempt}")

    def connected(self, name: str) -> "Store":
        """Return a connection to the store of its own, with names of its own."""
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        deadline, port = time.monotonic() + self._timeout_s, self.outer.port
        while True:  # torch's own wait reacts to no signal
            try:
                with closing(socket.create_connection((self._host, port), timeout=_LISTEN_S)):
                    break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ResourceError(
                        f"{self.node}: rank 0 doesn't answer at {self._host}:{port} within parallel.start_timeout_s "
                        f"({self._timeout_s:g} s): {error.strerror or error}. "
                        "Set MASTER_ADDR to an address of rank 0's machine that all machines reach."
                    ) from error
                time.sleep(_POLL_S)
        timeout = timedelta(seconds=self._timeout_s)
        return PrefixStore(
            name, TCPStore(self._host, port, is_master=False, timeout=timeout, wait_for_workers=False)
        )  # fmt: skip

    def publish(self) -> None:
        """Tell rank 0 the facts about this rank."""
        outer = self.outer
        facts = RankFacts(
            rank=outer.rank,
            local_rank=outer.local_rank,
            resources=detect(),
            cores=usable_cores(),
            gpus=visible_gpus(),
            address=address_facing(outer.host) if outer.has_several_nodes else LOOPBACK,
            versions=_find_versions(),
        )
        self._store.set(f"facts/{outer.rank}", facts.model_dump_json())

    def report_failure(self, message: str) -> None:
        """Tell rank 0 the error for which this rank can't take part; the first one counts."""
        if not self._store.check(["failure"]):
            self._store.set("failure", f"rank {self.outer.rank} on {self.node} could not start: {message}")

    def gather(self) -> list[RankFacts]:
        """Wait for the facts of all ranks, and return them in the order of ranks. For rank 0."""
        missing, deadline = set(range(self.outer.world_size)), time.monotonic() + self._timeout_s
        while missing := {rank for rank in missing if not self._store.check([f"facts/{rank}"])}:
            if self._store.check(["failure"]):
                raise UsageError(self._store.get("failure").decode())
            if time.monotonic() > deadline:
                named = ", ".join(map(str, sorted(missing)[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
                raise ResourceError(
                    f"{self.outer.name} started {self.outer.world_size} processes. {len(missing)} of them did not "
                    f"reach rank 0 on {self.node} within parallel.start_timeout_s ({self._timeout_s:g} s): rank {named}"
                )
            time.sleep(_POLL_S)
        facts = []
        for rank in range(self.outer.world_size):
            try:
                facts.append(RankFacts.model_validate_json(self._store.get(f"facts/{rank}")))
            except ValidationError as error:
                message = f"rank {rank} has another version of ddp-pipeline than rank 0. Install the same on all nodes."
                raise ResourceError(message) from error
        return facts

    def send(self, command: Command) -> None:
        """Give the other ranks a command. For rank 0."""
        self._store.set(f"command/{self.number}", command.model_dump_json())
        self.number += 1

    def end(self, exit_code: int) -> None:
        """Tell the other ranks how the run ended; wait a while until all that live know. For rank 0."""
        read, deadline = f"read/{self.number}", time.monotonic() + _FAREWELL_S
        self.send(Command(exit_code=exit_code))
        while self._store.add(read, 0) < self.outer.world_size - 1 and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def receive(self) -> Command:
        """Wait for rank 0's next command; DistError if its store is gone. For the other ranks."""
        key, start = f"command/{self.number}", time.monotonic()
        while not self._store.check([key]):  # less and less often: rank 0 answers all ranks while it measures
            time.sleep(min(max(_POLL_S, 0.1 * (time.monotonic() - start)), _LONGEST_POLL_S))
        command = Command.model_validate_json(self._store.get(key))
        if self._store.add(f"read/{self.number}", 1) == self.outer.world_size - 1:
            self._store.delete_key(key)  # it contains the key of the trial's channel
        self.number += 1
        return command

    def _open(self) -> "Store":
        from pipeline.worker import open_store

        try:
            return open_store(self._host, self.outer.port, timeout=timedelta(seconds=self._timeout_s))
        except OSError as error:
            raise ResourceError(
                f"rank 0 can't listen at {self._host}:{self.outer.port}: {error.strerror or error}. For all ranks, set "
                f"MASTER_ADDR to an address of {self.node}, where rank 0 runs, and MASTER_PORT to a free port."
            ) from error


@cache
def join(outer: OuterLauncher, *, timeout_s: float) -> Group:
    """Return this process's group, and join it first at the first call."""
    with undisturbed():
        import torch  # noqa: F401 - takes seconds
    return Group(outer, timeout_s=timeout_s)


@cache
def facts_of_all(outer: OuterLauncher, *, timeout_s: float) -> list[RankFacts]:
    """Return the facts of all ranks, in the order of ranks. For rank 0."""
    group = join(outer, timeout_s=timeout_s)
    group.publish()
    return group.gather()


# What commands call


@contextmanager
def leading(experiment: Experiment) -> Iterator[None]:
    """Lead the other ranks of an outer launcher, if there is one: at the end of the block they learn how it ended.

    Raises:
        UsageError: the experiment asks for another launcher.
        ResourceError: the ranks can't be connected.
    """
    if (outer := outer_launcher()) is None:
        yield
        return
    if (launcher := experiment.parallel.launcher) != _LAUNCHER:
        raise UsageError(
            f"parallel.launcher: is {launcher}, but {outer.name} started this process. "
            f"Add parallel.launcher={_LAUNCHER}, or start it with pipeline run alone."
        )
    group, code = join(outer, timeout_s=experiment.parallel.start_timeout_s), 1
    try:
        yield
        code = 0
    except BaseException as error:
        code = getattr(error, "exit_code", 1)
        if isinstance(error, KeyboardInterrupt):
            code = 143 if isinstance(error, Terminated) else 130
        raise
    finally:
        # The launcher may end this process as soon as another rank has exited; how the run ended is decided.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with suppress(RuntimeError):  # the launcher that serves the store has ended
            group.end(code)


def check_workers(plan: Plan) -> Plan:
    """Return the plan, after a check that its trials use all processes of an outer launcher, or one.

    Raises:
        UsageError: a trial has another number of workers.
    """
    if (outer := outer_launcher()) is None:
        return plan
    for trial in plan.trials:
        if trial is plan.main and trial.workers != outer.world_size:
            wanted = plan.experiment.parallel
            allowed = f"{wanted.least_workers} to {wanted.workers}" if wanted.is_elastic else str(wanted.workers)
            raise UsageError(
                f"parallel.workers: is {allowed}, but {outer.name} started {outer.world_size} processes. "
                "Make the numbers equal."
            )
        if trial.workers not in (1, outer.world_size):
            raise UsageError(
                f"{outer.name} started {outer.world_size} processes, but {trial.name} has {trial.workers} workers. "
                f"Set 1 or {outer.world_size} workers under compare, or add --no-baseline."
            )
    return plan


def report_failure(error: PipelineError) -> None:
    """Send rank 0 the error of this rank, which can't take part, if torchrun's own store can be reached.

    Where rank 0 would open the store, it may have failed as well. It then notices the missing rank by itself.
    """
    outer = outer_launcher()
    if outer is not None and not outer.is_driver and outer.has_store:
        with suppress(RuntimeError, ConnectionError, PipelineError):
            join(outer, timeout_s=_REPORT_S).report_failure(str(error))


def follow(experiment: Experiment) -> None:
    """Be a rank other than 0: work on rank 0's trials, until the end of the run.

    Raises:
        TrainingError: rank 0 has ended.
        ResourceError: rank 0 can't be reached.
        SystemExit: the run has not succeeded; with rank 0's exit code.
    """
    outer = outer_launcher()
    assert outer is not None
    if experiment.parallel.launcher != _LAUNCHER:
        sys.exit(UsageError.exit_code)  # rank 0 says why
    # Python's own handler would wait until torch's C code has returned, and it waits for the other ranks.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    group = join(outer, timeout_s=experiment.parallel.start_timeout_s)
    from torch.distributed import DistError

    gone = f"rank {outer.rank} on {group.node} lost the connection to rank 0, which drives the run"
    try:
        group.publish()
        while (command := group.receive()).trial:
            _work(command, group, gone=gone)
    except (DistError, ConnectionError) as error:
        raise TrainingError(gone) from error
    except KeyboardInterrupt:  # a terminal sends it to all; rank 0 says how to continue
        sys.exit(130)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if command.exit_code:
        sys.exit(command.exit_code)


class _Outbox(ChannelOutbox):
    """Outbox of a rank other than 0. From the training's first question on, SIGTERM to this rank asks for a stop."""

    grace_s = 0.0
    _has_handler = False

    @property
    def stop_asked(self) -> bool:
        """True if the training is asked to end early."""
        if not self._has_handler:
            self._has_handler = True
            on_sigterm(self._stop)
        return super().stop_asked

    def _stop(self) -> None:
        self.ask_to_stop()
        end_after(self.grace_s)


def _work(command: Command, group: Group, *, gone: str) -> None:
    """Work on a trial as a rank other than 0."""
    from pipeline import worker

    trial, address = trial_from_json(command.trial), Address.parse(command.channel)
    rank = _enter(trial, group, command.gpus, host=address.host)
    store = group.connected(f"ranks/{group.outer.attempt}/{group.number}")
    with (
        _Outbox(address, rank=rank.rank, folder=Path(trial.folder), last_words=gone) as outbox,
        suppress(worker.WorkerFailed),  # rank 0 says how the run goes on
    ):
        outbox.grace_s = trial.experiment.parallel.grace_s
        worker.run(trial, rank, outbox, store=store, end=partial(worker.end_process, outbox.close))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _enter(trial: Trial, group: Group, gpus: Sequence[int | None], *, host: str) -> Rank:
    """Prepare this process for a trial, whose inbox is at ``host``; return its rank."""
    from threadpoolctl import threadpool_limits

    outer = group.outer
    network = interface_variables(address_facing(host)) if host != LOOPBACK else {}
    os.environ.update(outer.variables | network, OMP_NUM_THREADS=str(trial.cpus_per_worker))
    threadpool_limits(trial.cpus_per_worker)  # libraries have read the variable before
    return Rank(
        rank=outer.rank,
        local_rank=outer.local_rank,
        world_size=outer.world_size,
        local_world_size=outer.local_world_size,
        node=group.node,
        gpu=gpus[outer.rank],
    )


# Rank 0


def launch(attempt: Attempt, outer: OuterLauncher, stop: StopRequest) -> Outcome:
    """Run a trial on all ranks, as rank 0: it trains in a thread, so that this one sees signals and who hangs."""
    trial = attempt.trial
    timeout_s = trial.experiment.parallel.start_timeout_s
    group, facts = join(outer, timeout_s=timeout_s), facts_of_all(outer, timeout_s=timeout_s)
    host = LOOPBACK
    if outer.has_several_nodes:
        far = (each.address for each in facts[1:] if not is_loopback(each.address))
        host = address_facing(next(far, outer.host))
    gpus = find_gpus(facts, each=max(1, trial.devices_per_worker))
    if trial.device == "cuda" and None in gpus:
        bare = gpus.index(None)
        raise ResourceError(
            f"rank {bare} on {facts[bare].resources.node} has no GPU of its own: other ranks of its node take all that "
            "it sees. Start at most one rank per GPU, or show each rank only its own GPU (srun: --gpus-per-task=1)."
        )
    with attempt.listening(host) as address:
        group.send(Command(trial=trial.model_dump_json(), channel=str(address), gpus=gpus))
        rank = _enter(trial, group, gpus, host=host)
        store = group.connected(f"ranks/{outer.attempt}/{group.number}")
        training = threading.Thread(target=_train, args=(attempt, rank, store, stop), name="rank 0", daemon=True)
        training.start()
        try:
            losses = await_ends(attempt, training, deadline=time.monotonic() + timeout_s)
        except Terminated:  # perhaps by the launcher, which has noticed a lost rank first
            time.sleep(_KNOWN_S)
            if not (losses := dict.fromkeys(attempt.lost, _DIED)):
                raise
        finally:
            abandon(training)  # it may wait for a rank that is lost
    outcome = attempt.outcome(losses | {rank: how for rank, how in attempt.silent.items() if rank in losses})
    if losses and stop.asked and time.monotonic() - stop.asked_at < 2 * SAME_S:
        stop.why = outcome.error  # for which the launcher has sent SIGTERM
    return replace(outcome, nodes={each.rank: each.resources.node for each in facts})


def _train(attempt: Attempt, rank: Rank, store: "Store", stop: StopRequest) -> None:
    from pipeline import worker

    folder = Path(attempt.trial.folder)
    outbox = DirectOutbox(folder, attempt.receive_sent, is_stopping=lambda: stop.asked)
    try:
        # This process records: when it hangs, it waits instead of ending.
        if not worker.run(attempt.trial, rank, outbox, store=store, end=threading.Event().wait):
            stop.ask()  # perhaps another rank has been asked
    except worker.WorkerFailed:
        pass  # it has been reported, and the run's log has the traceback
    finally:
        attempt.hung_up(0)


def await_ends(attempt: Attempt, training: threading.Thread, *, deadline: float) -> dict[int, str]:
    """Wait until all ranks have ended, or one has failed and the others had time to say more; return who was lost."""
    ranks, failed_at = set(range(attempt.trial.workers)), None
    while True:
        has_ended, now = ranks <= attempt.ended and not training.is_alive(), time.monotonic()
        failures = attempt.outcome().failures
        if attempt.lost:
            return dict.fromkeys(attempt.lost, _DIED)
        if has_ended:
            return {}
        if failures:
            failed_at = failed_at or now
            if any(failure.origin == "rank" for failure in failures):
                if now - failed_at > _LOSS_S or ranks <= attempt.ended:
                    return {}
            elif now - failed_at > _LAST_REPORTS_S or ranks <= attempt.ended:
                return dict.fromkeys(ranks - attempt.ended, _DIED)  # those that the others have failed for
        if now > deadline and (late := ranks - attempt.nodes.keys()):
            limit = attempt.trial.experiment.parallel.start_timeout_s
            return dict.fromkeys(late, f"it did not start within parallel.start_timeout_s ({limit:g} s)")
        time.sleep(_POLL_S / 2)


# Resources of all ranks


def resources_of_all(outer: OuterLauncher, parallel: Parallel) -> Resources:
    """Return what all ranks have together. For rank 0."""
    facts = facts_of_all(outer, timeout_s=parallel.start_timeout_s)
    refuse_others(facts)
    return combined(facts)


def refuse_others(facts: Sequence[RankFacts]) -> None:
    """Check that all ranks have rank 0's versions of Python, torch and this package."""
    problems = dict.fromkeys(
        f"{rank.resources.node}: it has {package} {there}, and rank 0 has {own}"
        for rank in facts[1:]
        for package, own in facts[0].versions.items()
        if (there := rank.versions.get(package, "none")) != own
    )
    if problems:
        here = facts[0].resources.node
        what = f"versions differ from rank 0's on {here}. Install the same versions on all nodes:"
        raise ResourceError("\n".join([what, *problems]))


def combined(facts: Sequence[RankFacts]) -> Resources:
    """Add up what the ranks have; cores and GPUs that several ranks of a node may use count once."""
    nodes: dict[tuple[str, int], list[RankFacts]] = {}
    for rank in facts:  # machines of the same name are told apart by their ranks on them, which begin at 0
        name = rank.resources.node
        machine = 0
        while any(rank.local_rank == other.local_rank for other in nodes.get((name, machine), ())):
            machine += 1
        nodes.setdefault((name, machine), []).append(rank)
    placed, gpus, kinds = [], list[str](), dict[str, list[str]]()
    for (name, _), ranks in nodes.items():
        # torchrun lets all ranks use all cores, srun may bind them; a container's limit counts, too.
        cpus = {rank.cores: rank.resources.cpus for rank in ranks}
        sharing = {cores: sum(rank.cores == cores for rank in ranks) for cores in cpus}
        union, seen = len(set().union(*cpus)), {uuid: gpu for rank in ranks for uuid, gpu in rank.gpus.items()}
        placed.append(
            Placed(
                node=name,
                workers=len(ranks),
                cpus=min(union or sum(cpus.values()), sum(cpus.values())),
                cpus_per_worker=min(cpus[cores] // sharing[cores] for cores in cpus),
            )
        )
        gpus += seen.values()
        kind = ", ".join(dict.fromkeys(sorted(seen.values()))) or ranks[0].resources.processor
        kinds.setdefault(kind, []).append(name)
    notes = []
    if len(kinds) > 1:
        each = "; ".join(f"{', '.join(names[:_NAMED])}: {kind}" for kind, names in kinds.items())
        notes.append(f"The nodes have different hardware, so in each step the faster nodes wait: {each}")
    first, names = facts[0], [name for name, _ in nodes]
    return Resources(
        cpus=sum(node.cpus for node in placed),
        memory_mb=sum(ranks[0].resources.memory_mb for ranks in nodes.values()),
        gpus=tuple(gpus),
        node=listed(names, most=_NAMED),
        processor=first.resources.processor,
        nodes=len(nodes),
        has_compiler=all(rank.resources.has_compiler for rank in facts),
        placed=tuple(placed),
        is_divided=any(len({rank.cores for rank in ranks}) > 1 for ranks in nodes.values()),
        notes=tuple(notes),
    )


def find_gpus(facts: Sequence[RankFacts], *, each: int) -> tuple[int | None, ...]:
    """Return, for each rank, the index of its first GPU among those that it sees: the first that is still free.

    With --gpu-bind=closest, srun shows a rank some GPUs of its node, and the same ones to others. None: all are taken.
    """
    taken: set[str] = set()
    indices = []
    for visible in [list(rank.gpus) for rank in facts]:
        index = next((number for number, uuid in enumerate(visible) if uuid not in taken), None)
        if index is not None:
            taken.update(visible[index : index + each])
        indices.append(index)
    return tuple(indices)


def _find_versions() -> dict[str, str]:
    """Return the versions; torch's without the build, such as +cpu, which nodes with and without GPUs don't share."""
    digest = hashlib.sha256()  # checkouts of the same version may differ
    for path in sorted(Path(PACKAGE).rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": version("torch").partition("+")[0],
        "ddp-pipeline": version("ddp-pipeline"),
        "code of pipeline": digest.hexdigest()[:12],
    }


# Addresses


def find_own_address(outer: OuterLauncher) -> str:
    """Return the address at which rank 0 listens for the ranks of other machines."""
    if not outer.has_several_nodes:
        return LOOPBACK
    with suppress(OSError):
        found = socket.getaddrinfo(outer.host, None, type=socket.SOCK_STREAM)
        addresses = [str(each[4][0]) for each in sorted(found, key=lambda each: each[0] == socket.AF_INET6)]
        for address in addresses:  # those of IPv4 first; on a machine, its own name often leads to loopback
            if not is_loopback(address):
                return address
    return "0.0.0.0"  # noqa: S104 - no name leads to an address that others reach


def address_facing(host: str) -> str:
    """Return the address of this machine from which packets to a host leave."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with closing(socket.socket(family, kind, protocol)) as probe:  # it sends nothing
        probe.connect(address)
        return str(probe.getsockname()[0])


def is_loopback(address: str) -> bool:
    """Return True if only this machine can reach an address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_variables(own: str) -> dict[str, str]:
    """Return the variables that name an address's interface to gloo, which would take the host name's, and to NCCL."""
    interfaces = {name: [each.address for each in those] for name, those in psutil.net_if_addrs().items()}
    name = next((name for name, addresses in interfaces.items() if own in addresses), None)
    # Without "=" NCCL takes the name as a prefix.
    found = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name is not None else {}
    return {variable: value for variable, value in found.items() if variable not in os.environ}
