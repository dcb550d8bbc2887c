"""Facts about the ranks of an outer launcher, and their sum on rank 0; addresses at which ranks reach each other."""

import ipaddress
import os
import platform
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress

import psutil

from pipeline.errors import ResourceError
from pipeline.experiment.values import Frozen
from pipeline.launch.base import LOOPBACK
from pipeline.launch.node_facts import version_of
from pipeline.plan.outer_launcher import OuterLauncher
from pipeline.plan.resources import Placed, Resources, detect, usable_cores, visible_gpus
from pipeline.wording import listed


class RankFacts(Frozen):
    """Facts about a rank and its machine, as the rank itself finds them."""

    rank: int
    resources: Resources
    """Resources that this process may use; another rank of the node may use the same."""
    cores: tuple[int, ...]
    """Numbers of the cores that it may use, which tell shared from divided cores."""
    gpus: dict[str, str]
    """Names of the GPUs that it sees, by UUID."""
    address: str
    """Address of the machine that faces rank 0's."""
    versions: dict[str, str | None]
    """Versions that all ranks must share, by package."""


def find_facts(outer: OuterLauncher) -> RankFacts:
    """Return the facts about this rank."""
    return RankFacts(
        rank=outer.rank,
        resources=detect(),
        cores=usable_cores(),
        gpus=visible_gpus(),
        address=address_facing(outer.host) if outer.has_several_nodes else LOOPBACK,
        versions=find_versions(),
    )


def find_versions() -> dict[str, str | None]:
    """Return the versions that all nodes must share; torch's without its build, such as +cpu. None: not installed."""
    torch = (version_of("torch") or "").partition("+")[0]
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python, "torch": torch or None, "ddp-pipeline": version_of("ddp-pipeline")}


def refuse_others(facts: Sequence[RankFacts]) -> None:
    """Check that all ranks have rank 0's versions of Python, torch and this package."""
    problems = dict.fromkeys(
        f"{rank.resources.node}: it has {package} {rank.versions[package]}, and rank 0 has {own}"
        for rank in facts[1:]
        for package, own in facts[0].versions.items()
        if rank.versions[package] != own
    )
    if problems:
        what = f"versions differ from rank 0's on {facts[0].resources.node}. Install the same versions on all nodes:"
        raise ResourceError("\n".join([what, *problems]))


def combine_facts(facts: Sequence[RankFacts]) -> Resources:
    """Add up what the ranks have; cores and GPUs that several ranks of a node may use count once."""
    nodes: dict[tuple[str, str], list[RankFacts]] = {}
    for rank in facts:  # machines may share a name
        nodes.setdefault((rank.resources.node, rank.address), []).append(rank)
    placed, gpus = [], dict[str, str]()
    for (name, _), ranks in nodes.items():
        # torchrun lets all ranks use all cores, srun may bind them; a container's limit counts, too.
        cpus = {rank.cores: rank.resources.cpus for rank in ranks}
        union = len(set[int]().union(*cpus)) or sum(cpus.values())
        placed.append(Placed(node=name, workers=len(ranks), cpus=min(union, sum(cpus.values()))))
        gpus |= {uuid: gpu for rank in ranks for uuid, gpu in rank.gpus.items()}
    return Resources(
        cpus=sum(node.cpus for node in placed),
        memory_mb=sum(ranks[0].resources.memory_mb for ranks in nodes.values()),
        gpus=tuple(gpus.values()),
        node=listed([name for name, _ in nodes], most=3),
        processor=" + ".join(Counter(ranks[0].resources.processor for ranks in nodes.values())),
        nodes=len(nodes),
        has_compiler=all(rank.resources.has_compiler for rank in facts),
        placed=tuple(placed),
        is_divided=any(len({rank.cores for rank in ranks}) > 1 for ranks in nodes.values()),
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


def find_own_address(outer: OuterLauncher) -> str:
    """Return the address at which rank 0 listens for the ranks of other machines."""
    if not outer.has_several_nodes:
        return LOOPBACK
    with suppress(OSError):
        found = socket.getaddrinfo(outer.host, None, type=socket.SOCK_STREAM)
        for address in (str(each[4][0]) for each in sorted(found, key=lambda each: each[0] == socket.AF_INET6)):
            if not is_loopback(address):  # on a machine, its own name often leads there
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
    interfaces = psutil.net_if_addrs().items()
    name = next((name for name, those in interfaces if own in {each.address for each in those}), None)
    # Without "=" NCCL takes the name as a prefix.
    found = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name is not None else {}
    return {variable: value for variable, value in found.items() if variable not in os.environ}
