"""GPUs that CUDA shows to this process, found without torch and without opening a CUDA context."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

_TIMEOUT_S = 60.0
_QUESTION = """
import json, torch
torch.cuda.init()  # before that, torch counts partitioned GPUs as whole ones
gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
print(json.dumps({f"GPU-{gpu.uuid}": gpu.name for gpu in gpus}))
"""


def visible_gpus() -> dict[str, str]:
    """Return the names of the GPUs that CUDA shows to this process, by UUID: by NVML, or by CUDA itself with MIG."""
    gpus, is_partitioned = _list_gpus()
    if is_partitioned and (shown := _ask_cuda()) is not None:
        return shown
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return gpus if visible is None else {uuid: gpus[uuid] for uuid in _select(visible, [*gpus])}


def _list_gpus() -> tuple[dict[str, str], bool]:
    """Return the names of the GPUs that NVML can open, by UUID, and whether one of them is partitioned."""
    import pynvml  # loads the NVIDIA driver's library; only here, so that a machine without it does not wait for it

    gpus: dict[str, str] = {}
    is_partitioned = False
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return {}, False
    for index in range(count):
        with suppress(pynvml.NVMLError):  # not permitted (Slurm's cgroups), or lost: CUDA leaves it out
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            gpus[str(pynvml.nvmlDeviceGetUUID(handle))] = str(pynvml.nvmlDeviceGetName(handle))
            with suppress(pynvml.NVMLError):  # not supported
                is_partitioned |= pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    pynvml.nvmlShutdown()
    return gpus, is_partitioned


def _ask_cuda() -> dict[str, str] | None:
    """Return the names of the GPUs that CUDA shows to a new process, by UUID; None if it shows none."""
    try:
        asked = subprocess.run(  # noqa: S603 - our own arguments
            [sys.executable, "-c", _QUESTION], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {str(uuid): str(name) for uuid, name in json.loads(asked.stdout.splitlines()[-1]).items()}


def _select(visible: str, uuids: Sequence[str]) -> list[str]:
    """Return the UUIDs that CUDA_VISIBLE_DEVICES selects, in its order.

    As CUDA does, stop at the first entry without a GPU, and select none if a GPU is named twice.
    """
    entries = visible.split(",")
    selected: list[str] = []
    for entry in entries:
        if entries[0].startswith(("GPU-", "MIG-")):
            found = [uuid for uuid in uuids if uuid.startswith(entry)]
        else:  # CUDA reads an index as C's strtoul does: "1b" is 1
            index = re.match(r"\s*\+?(\d+)", entry)
            found = list(uuids[int(index[1]) : int(index[1]) + 1]) if index else []
        if len(found) != 1:
            break
        if found[0] in selected:
            return []
        selected += found
    return selected
