"""Facts of a node: versions, GPUs, cores, memory. `collect` runs on the node itself."""

from pipeline.experiment.values import Frozen
from pipeline.launch.cluster.node_facts import collect

INSTALL_SAME_COMMIT = "install it from this machine's commit: pip install git+https://HOST/REPOSITORY@COMMIT"
"""Remedy for another version of this project, which is on no package index."""


class Gpu(Frozen):
    """GPU, named as by its driver."""

    name: str
    memory_mb: int


class Torch(Frozen):
    """Installed version of torch."""

    version: str
    cuda: str | None
    """CUDA version of the build; None for a CPU build."""
    nccl: str | None
    """Version of the NCCL that is installed with it."""
    cuda_available: bool | None
    """True if torch can use the GPUs; None: not tried, without GPUs or with a CPU build."""
    cuda_error: str | None
    """Reason why torch can't use the GPUs."""
    cuda_devices: int = 0
    """GPUs that CUDA shows to a process: CUDA_VISIBLE_DEVICES or MIG may hide some."""


class NodeFacts(Frozen):
    """Facts of one node. A version is None if the package is not installed."""

    node: str
    address: str | None = None
    """Address in the Ray cluster; None for this machine without Ray."""
    ray_node: str | None = None
    """Ray's id of the node."""
    python: str
    torch: Torch | None
    ray: str | None
    mlflow: str | None
    pipeline: str | None
    gpus: tuple[Gpu, ...]
    driver: str | None
    """Version of the NVIDIA driver."""
    driver_cuda: str | None
    """Newest CUDA version that the driver supports."""
    gpu_error: str | None
    """Error of nvidia-smi."""
    cpus: int
    """Cores that a process may use, by its affinity and the container's limit."""
    memory_mb: int
    """Memory of the machine, or the container's limit."""
    memory_free_mb: int
    shared_memory_mb: int | None
    """Size of /dev/shm; None if it doesn't exist."""
    shared_memory_free_mb: int | None

    @property
    def versions(self) -> dict[str, str | None]:
        """Versions that all nodes of a run must share, by package.

        Python's are without the patch level, torch's without the build, such as +cpu, which differs between nodes with
        and without GPUs.
        """
        return {
            "Python": ".".join(self.python.split(".")[:2]),
            "torch": self.torch.version.partition("+")[0] if self.torch else None,
            "ray": self.ray,
            "ddp-pipeline": self.pipeline,
        }

    @property
    def label(self) -> str:
        """Name and address; nodes of a cluster may share a name."""
        return f"{self.node} ({self.address})" if self.address else self.node


def facts_here() -> NodeFacts:
    """Collect the facts of this machine."""
    return NodeFacts.model_validate_json(collect.facts())
