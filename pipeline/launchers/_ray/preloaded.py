"""What a process of Ray's imports before it becomes a worker."""

import importlib

from pipeline.system.imports import undisturbed

with undisturbed():
    # Each optimizer of torch imports the last one.
    for _name in ("pipeline.launchers._ray.work", "pipeline.worker.main", "torch._dynamo"):
        importlib.import_module(_name)
