"""Imports of a prestarted Ray process, made before it becomes a worker."""

import gc
import importlib

from pipeline.system.imports import undisturbed

with undisturbed():
    # torch's optimizers import torch._dynamo.
    for _name in ("pipeline.launch._ray.work", "pipeline.worker", "torch._dynamo"):
        importlib.import_module(_name)
gc.freeze()  # as in the fork server: collections need not look through all of torch
