"""The table of peaks: whole names, so that a similar GPU gets none."""

import pytest

from pipeline.report.peaks import peaks_of


@pytest.mark.parametrize(
    ("gpu", "bf16"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("A100-PCIE-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA L4", 121),
        ("Tesla T4", None),
    ],
)
def test_a_gpu_is_known_by_its_whole_name(gpu: str, bf16: float | None) -> None:
    assert peaks_of(gpu).get("bf16") == bf16


@pytest.mark.parametrize(
    "gpu",
    ["NVIDIA A10G", "NVIDIA L40", "NVIDIA H20", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM-64GB",
     "NVIDIA H100 80GB HBM3 MIG 1g.10gb", ""],
)  # fmt: skip
def test_a_similar_name_is_not_known(gpu: str) -> None:
    assert peaks_of(gpu) == {}


def test_tensor_cores_are_not_slower() -> None:
    for gpu in ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 NVL", "NVIDIA L40S", "NVIDIA GeForce RTX 4090", "NVIDIA B200"):
        peaks = peaks_of(gpu)
        assert peaks["fp32"] <= peaks["tf32"] < peaks["bf16"] == peaks["fp16"]
