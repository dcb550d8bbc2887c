"""Resources of an outer launcher's ranks: cores, memory, GPUs and versions, each rank's share of its node."""

import hashlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path

from pydantic import ValidationError

from pipeline.errors import ResourceError
from pipeline.experiment.schema import Parallel
from pipeline.experiment.values import Frozen
from pipeline.launch._outer_group import OuterGroup, joined
from pipeline.plan.outer_launcher import OuterLauncher
from pipeline.plan.resources import Placed, Resources, detect, usable_cores
from pipeline.plan.visible_gpus import visible_gpus
from pipeline.system.imports import PACKAGE

_SHOWN = 3  # names of nodes


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
    settings: Mapping[str, str] = {}
    """Settings of the experiment as the rank has read it."""


def own_facts(group: OuterGroup) -> RankFacts:
    """Return the facts about this rank."""
    return RankFacts(
        rank=group.outer.rank,
        local_rank=group.outer.local_rank,
        resources=detect(),
        cores=usable_cores(),
        gpus=visible_gpus(),
        address=group.address,
        versions=_versions(),
        settings=group.settings,
    )


@cache
def facts_of_all(outer: OuterLauncher, *, timeout_s: float) -> tuple[RankFacts, ...]:
    """Return the facts of all ranks, in the order of ranks. For rank 0; for the errors see `OuterGroup`."""
    group = joined(outer, timeout_s=timeout_s)
    group.publish(own_facts(group).model_dump_json())
    return tuple(_read(rank, text) for rank, text in enumerate(group.gathered()))


def _read(rank: int, text: str) -> RankFacts:
    try:
        return RankFacts.model_validate_json(text)
    except ValidationError as error:
        message = f"rank {rank} has another version of ddp-pipeline than rank 0. Install the same version on all nodes."
        raise ResourceError(message) from error


def resources_of_all(outer: OuterLauncher, parallel: Parallel) -> Resources:
    """Return what all ranks have together. For rank 0.

    Raises:
        ResourceError: ranks are missing, or have other versions than rank 0.
    """
    facts = facts_of_all(outer, timeout_s=parallel.start_timeout_s)
    refuse_others(facts)
    return combined(facts)


def refuse_others(facts: Sequence[RankFacts]) -> None:
    """Check that all ranks have rank 0's versions of Python, torch and this package.

    Raises:
        ResourceError: versions differ; names each node once, with both versions.
    """
    problems = dict.fromkeys(problem for rank in facts[1:] for problem in _differences(rank, facts[0]))
    if problems:
        here = facts[0].resources.node
        what = f"versions differ from rank 0's on {here}. Install the same versions on all nodes:"
        raise ResourceError("\n".join([what, *problems]))


def combined(facts: Sequence[RankFacts]) -> Resources:
    """Add up what the ranks have; cores and GPUs that several ranks of a node may use count once."""
    nodes = _by_node(facts)
    first = facts[0].resources
    names = [ranks[0].resources.node for ranks in nodes]
    gpus = [
        name for ranks in nodes for name in {uuid: gpu for rank in ranks for uuid, gpu in rank.gpus.items()}.values()
    ]
    placed = tuple(map(_placed, nodes))
    return Resources(
        cpus=sum(node.cpus for node in placed),
        memory_mb=sum(ranks[0].resources.memory_mb for ranks in nodes),
        gpus=tuple(gpus),
        node=", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""),
        processor=first.processor,
        nodes=len(nodes),
        has_compiler=all(rank.resources.has_compiler for rank in facts),
        placed=placed,
        is_divided=any(len({rank.cores for rank in ranks}) > 1 for ranks in nodes),
        notes=(*_notes(nodes), *_describe_settings(facts)),
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


def _by_node(facts: Sequence[RankFacts]) -> list[list[RankFacts]]:
    """Group ranks by node; machines of the same name are told apart by their ranks on them, which begin at 0."""
    nodes: dict[tuple[str, int], list[RankFacts]] = {}
    seen: dict[tuple[str, int], int] = {}
    for rank in facts:
        place = (rank.resources.node, rank.local_rank)
        nodes.setdefault((rank.resources.node, seen.get(place, 0)), []).append(rank)
        seen[place] = seen.get(place, 0) + 1
    return list(nodes.values())


def _placed(ranks: Sequence[RankFacts]) -> Placed:
    """Return the cores of the ranks of a node: torchrun lets all ranks use all cores, srun may bind them."""
    cpus = {rank.cores: rank.resources.cpus for rank in ranks}  # a container's limit counts, too
    sharing = {cores: sum(rank.cores == cores for rank in ranks) for cores in cpus}
    union = len(set().union(*cpus))
    return Placed(
        node=ranks[0].resources.node,
        workers=len(ranks),
        cpus=min(union or sum(cpus.values()), sum(cpus.values())),
        cpus_per_worker=min(cpus[cores] // sharing[cores] for cores in cpus),
    )


def _notes(nodes: Sequence[Sequence[RankFacts]]) -> Iterator[str]:
    """Describe nodes whose GPUs or processors differ: in each step all wait for the slowest."""
    kinds: dict[str, list[str]] = {}
    for ranks in nodes:
        gpus = sorted(gpu for rank in ranks for gpu in rank.gpus.values())
        kind = ", ".join(dict.fromkeys(gpus)) or ranks[0].resources.processor
        kinds.setdefault(kind, []).append(ranks[0].resources.node)
    if len(kinds) > 1:
        each = "; ".join(f"{', '.join(names[:_SHOWN])}: {kind}" for kind, names in kinds.items())
        yield f"The nodes have different hardware, so in each step the faster nodes wait: {each}"


def _describe_settings(facts: Sequence[RankFacts]) -> Iterator[str]:
    """Name the settings in which ranks differ from rank 0; their values may be secret."""
    own = facts[0].settings
    for rank in facts[1:]:
        there = rank.settings
        if names := [name for name in {**own, **there} if own.get(name) != there.get(name)]:
            yield (
                f"rank {rank.rank} on {rank.resources.node} was started with another file or other arguments. Those "
                f"of rank 0 on {facts[0].resources.node} are used. Different: {', '.join(names)}"
            )
            return


def _differences(rank: RankFacts, first: RankFacts) -> Iterator[str]:
    for package, own in first.versions.items():
        if (there := rank.versions.get(package, "none")) != own:
            yield f"{rank.resources.node}: it has {package} {there}, and rank 0 has {own}"


def _versions() -> dict[str, str]:
    """Return the versions; torch's without the build, such as +cpu, which nodes with and without GPUs don't share."""
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": version("torch").partition("+")[0],
        "ddp-pipeline": version("ddp-pipeline"),
        "code of pipeline": _code(),
    }


def _code() -> str:
    """Return a digest of this package's code: checkouts of the same version may differ."""
    digest = hashlib.sha256()
    for path in sorted(Path(PACKAGE).rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
