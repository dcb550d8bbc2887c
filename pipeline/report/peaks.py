"""Peak arithmetic throughput of GPUs by the vendor's data sheets, in TFLOP/s without sparsity.

Data sheets of newer GPUs give figures with sparsity; these are half of them. H200 and GH200 compute like H100 SXM.

- V100: https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf
- T4: https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf
- A100: https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet.pdf
- A30, A10, A40, L4, L40S: https://resources.nvidia.com/l/en-us-gpu
- H100, H200: https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet
- B200: https://resources.nvidia.com/en-us-blackwell-architecture
- RTX 3090, 4090: appendices of the architectures' white papers, 16-bit types with sums in fp32
"""

import re
from collections.abc import Mapping
from typing import Literal

Arithmetic = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]

Peaks = Mapping[Arithmetic, float]

_H100: Peaks = {"fp64": 67, "fp32": 67, "tf32": 494.5, "bf16": 989.5, "fp16": 989.5}
_H100_NVL: Peaks = {"fp64": 60, "fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5}
_PEAKS: Mapping[str, Peaks] = {
    r"NVIDIA B200": {"fp64": 37, "fp32": 75, "tf32": 1125, "bf16": 2250, "fp16": 2250},
    r"NVIDIA (H100 80GB HBM3|H200|GH200 .*)": _H100,
    r"NVIDIA (H100|H200) NVL": _H100_NVL,
    r"NVIDIA H100 PCIe": {"fp64": 51, "fp32": 51, "tf32": 378, "bf16": 756, "fp16": 756},
    r"NVIDIA L40S": {"fp32": 91.6, "tf32": 183, "bf16": 362, "fp16": 362},
    r"NVIDIA L4": {"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121},
    r"NVIDIA GeForce RTX 4090": {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2},
    r"(NVIDIA )?A100(-(SXM4|PCIE)-(40|80)GB| 80GB PCIe)": {
        "fp64": 19.5, "fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312,
    },
    r"NVIDIA A30": {"fp64": 10.3, "fp32": 10.3, "tf32": 82, "bf16": 165, "fp16": 165},
    r"NVIDIA A40": {"fp32": 37.4, "tf32": 74.8, "bf16": 149.7, "fp16": 149.7},
    r"NVIDIA A10": {"fp32": 31.2, "tf32": 62.5, "bf16": 125, "fp16": 125},
    r"NVIDIA GeForce RTX 3090": {"fp32": 35.6, "tf32": 35.6, "bf16": 71, "fp16": 71},
    r"Tesla T4": {"fp32": 8.1, "fp16": 65},
    r"Tesla V100S-PCIE-32GB": {"fp64": 8.2, "fp32": 16.4, "fp16": 130},
    r"Tesla V100-PCIE-(16|32)GB": {"fp64": 7, "fp32": 14, "fp16": 112},
    r"Tesla V100-SXM2-(16|32)GB": {"fp64": 7.8, "fp32": 15.7, "fp16": 125},
}  # fmt: skip
"""Peaks by the whole name that CUDA gives the GPU; a part of a GPU (MIG) has another name."""


def peaks_of(gpu: str) -> Peaks:
    """Return the peaks of a GPU by arithmetic, as far as they are known."""
    return next((peaks for name, peaks in _PEAKS.items() if re.fullmatch(name, gpu)), {})
