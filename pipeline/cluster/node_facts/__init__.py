"""What a node has: versions, GPUs, cores, memory, disk, clock. `collect` asks on the node itself."""

from pipeline.cluster.node_facts import collect
from pipeline.config.values import Frozen


class Gpu(Frozen):
    """A GPU as the driver names it."""

    name: str
    memory_mb: int


class Torch(Frozen):
    """An installed torch."""

    version: str
    cuda: str | None
    """The CUDA version that it was built for; None for a CPU build."""
    nccl: str | None
    """The NCCL that it brings along."""
    cuda_available: bool | None
    """Whether it can use the GPUs; None: not asked, since there is no GPU or it is a CPU build."""
    cuda_error: str | None
    """Why it can't."""


class Disk(Frozen):
    """Room on the disk that a folder is on."""

    folder: str
    free_mb: int


class NodeFacts(Frozen):
    """One node. Versions are None for what is not installed, limits None for what is unlimited."""

    node: str
    address: str | None = None
    """Where Ray reaches it; None for this machine without Ray."""
    ray_node: str | None = None
    """Ray's id of it."""
    hostname_address: str | None
    """What its own name resolves to; None: to nothing."""
    python: str
    torch: Torch | None
    ray: str | None
    mlflow: str | None
    pipeline: str | None
    gpus: tuple[Gpu, ...]
    driver: str | None
    """Version of the NVIDIA driver."""
    driver_cuda: str | None
    """The newest CUDA version that the driver can run."""
    gpu_error: str | None
    """What nvidia-smi says when it fails."""
    cpus: int
    """Cores that a process may use: affinity and container limits count."""
    memory_mb: int
    """The machine's, or the container's limit."""
    memory_free_mb: int
    shared_memory_mb: int | None
    """Size of /dev/shm; None where there is none."""
    shared_memory_free_mb: int | None
    disks: tuple[Disk, ...]
    """Those of the working directory and of temporary files."""
    open_files: int | None
    """Limit on open files of a process."""
    processes: int | None
    """Limit on processes of the user."""
    compiler: str | None
    """The C++ compiler that torch.compile calls."""
    git: str | None
    clock: float
    """Its clock when it was asked, s since 1970."""
    clock_ahead_s: float | None = None
    """How far its clock is ahead of the asking machine's; None: not compared."""
    clock_error_s: float | None = None
    """Half the round trip that was needed to find out."""

    @property
    def label(self) -> str:
        """Its name, with the address where there is one: nodes of a cluster may share a name."""
        return f"{self.node} ({self.address})" if self.address else self.node


def facts_here() -> NodeFacts:
    """Of this machine."""
    return NodeFacts.model_validate_json(collect.facts())
