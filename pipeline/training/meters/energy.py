"""Energy of a training, by the counters of its GPUs, which the driver's management library (NVML) reads."""

from collections.abc import Iterable

from pipeline.protocol.trial import Training
from pipeline.protocol.trial_result import Energy
from pipeline.training.context import TrainContext
from pipeline.training.ranks.collectives import gather
from pipeline.training.ranks.rank_gpus import uuid_of


class EnergyMeter:
    """Difference of the energy counters of a rank's GPUs since the meter was made; only a training reads them."""

    def __init__(self, context: TrainContext) -> None:
        self._rank = context.rank
        self._uuids = [uuid_of(device) for device in context.gpus] if isinstance(context.trial, Training) else []
        self._before = _millijoules(self._uuids)

    def of(self, samples: int) -> Energy | None:
        """Return the energy of all GPUs of the training so far; None if any of them doesn't count it. Collective.

        Args:
            samples: those that the GPUs were trained on meanwhile.
        """
        after = _millijoules(self._uuids)
        own = {uuid: after[uuid] - before for uuid, before in self._before.items() if uuid in after}
        ranks = gather((self._uuids, own), rank=self._rank)
        uuids = {uuid for known, _ in ranks for uuid in known}  # ranks may share a GPU
        used = {uuid: spent for _, spents in ranks for uuid, spent in spents.items()}
        if not uuids or not samples or uuids != used.keys():
            return None
        return Energy(joules=sum(used.values()) / 1000, samples=samples)


def _millijoules(uuids: Iterable[str]) -> dict[str, int]:
    """Read the counters, in mJ since the driver was loaded, of the GPUs that have one: those from Volta on.

    A part of a GPU (MIG) has none, and none has one without the NVIDIA driver.
    """
    wanted = list(uuids)
    if not wanted:
        return {}
    import pynvml  # only here: a machine without GPUs pays nothing

    try:
        pynvml.nvmlInit()
        try:
            handles = {uuid: pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in wanted}
            return {uuid: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) for uuid, handle in handles.items()}
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return {}
