"""Peak throughput of GPUs by arithmetic, in TFLOP/s, dense: without structured sparsity.

The figures are the vendor's, each as two of the pages below quote them from its data sheets; the sheets themselves were
not at hand. Sheets give some figures only with sparsity; these are half of them. fp64 and tf32 are those of tensor
cores, fp32 is that of the other cores. Types and GPUs for which there is one page only, or pages that differ, are left
out, e.g. H100 NVL, GeForce RTX 4090.

- V100, T4, A100, H100, L4: Lightning, src/lightning/fabric/utilities/throughput.py
- A100, L4: PyTorch, torch/_inductor/analysis/device_info.py
- A100, H100 PCIe, H200: torchtitan, torchtitan/tools/utils.py
- A100: https://glennklockwood.com/garden/processors/A100
- H100 SXM, and H200, which computes like it: https://glennklockwood.com/garden/processors/h100
- H100 SXM, L40S: https://hmc-tech.com/gpu/nvidia-gb200-vs-nvidia-h100-sxm, .../nvidia-l40s-vs-nvidia-t40
- L40S: https://www.mullet.se/product.html?product_id=355414, LLMRoofline, hardware_dict.py
- V100: https://grokipedia.opelly.me/articles/nvidia-tesla-v100
- T4: https://geektopia.es/es/technology/2018/09/13/noticias/
"""

import re
from collections.abc import Mapping

Peaks = Mapping[str, float]
"""By arithmetic, as in `pipeline.protocol.trial_result.Flops`."""

_PEAKS: Mapping[str, Peaks] = {
    r"NVIDIA (H100 80GB HBM3|H200)": {"fp64": 66.9, "fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4},
    r"NVIDIA H100 PCIe": {"bf16": 756},
    r"(NVIDIA )?A100(-(SXM4|PCIE)-(40|80)GB| 80GB PCIe)": {
        "fp64": 19.5, "fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312,
    },
    r"NVIDIA L40S": {"fp32": 91.6, "tf32": 183, "bf16": 362, "fp16": 362},
    r"NVIDIA L4": {"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121},
    r"Tesla V100-SXM2-(16|32)GB": {"fp64": 7.8, "fp32": 15.7, "fp16": 125},
    r"Tesla T4": {"fp32": 8.1, "fp16": 65},
}  # fmt: skip
"""Peaks by the whole name that CUDA gives the GPU; a part of a GPU (MIG) has another name."""


def peaks_of(gpu: str) -> Peaks:
    """Return the peaks of a GPU by arithmetic, as far as they are known."""
    return next((peaks for name, peaks in _PEAKS.items() if re.fullmatch(name, gpu)), {})
