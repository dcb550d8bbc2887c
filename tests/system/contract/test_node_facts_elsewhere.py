"""What a node says of itself where this package is missing, and what NVIDIA's program says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import torch
from ray import cloudpickle

from pipeline.launch import node_facts
from pipeline.launch.node_facts import NodeFacts, facts_here


def test_the_questions_can_be_asked_where_the_package_is_missing() -> None:
    cloudpickle.register_pickle_by_value(node_facts)
    try:
        question = cloudpickle.dumps(node_facts.collect)
    finally:
        cloudpickle.unregister_pickle_by_value(node_facts)
    there = "import sys, pickle; sys.modules['pipeline'] = None; print(pickle.load(sys.stdin.buffer)(all_gpus=True))"
    asked = subprocess.run([sys.executable, "-c", there], input=question, capture_output=True, check=True)
    facts = NodeFacts.model_validate_json(asked.stdout)

    assert facts.ray == ray.__version__
    assert facts.torch is not None
    assert facts.torch.version == torch.__version__
    assert facts.torch.cuda == torch.version.cuda


def nvidia_smi(folder: Path, *, prints: str, code: int = 0) -> None:
    """A program that says what NVIDIA's says, where there is no GPU."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{prints}\nEND\nexit {code}\n")
    program.chmod(0o755)


def test_gpus_are_what_the_driver_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus = "".join(
        f"<gpu><product_name>{name}</product_name><fb_memory_usage><total>{size}</total></fb_memory_usage></gpu>"
        for name, size in (("NVIDIA H200", "143771 MiB"), ("NVIDIA GB200", "N/A"))
    )
    versions = "<driver_version>570.86</driver_version><cuda_version>12.8</cuda_version>"
    nvidia_smi(tmp_path, prints=f'<?xml version="1.0" ?>\n<nvidia_smi_log>{versions}{gpus}</nvidia_smi_log>')
    there = facts_here()
    nvidia_smi(tmp_path, prints="Failed to initialize NVML: Driver/library version mismatch", code=18)
    broken = facts_here()

    assert [(gpu.name, gpu.memory_mb) for gpu in there.gpus] == [("NVIDIA H200", 143_771), ("NVIDIA GB200", 0)]
    assert (there.driver, there.driver_cuda, there.gpu_error) == ("570.86", "12.8", None)
    assert broken.gpus == ()
    assert broken.gpu_error == "Failed to initialize NVML: Driver/library version mismatch"
