"""Precision of fp32 matrix products, and precision and kernels of convolutions.

Read and set by whichever API of torch user code has used.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

TF32_CAPABILITY = (8, 0)
"""First compute capability with TF32, Ampere's: CUDA C++ Programming Guide, "Compute Capabilities"."""


def matmul_precision() -> str:
    """Return the precision of fp32 matrix products: "highest", "high" (TF32) or "medium".

    torch's own function raises once code has used the other API, ``torch.backends.cuda.matmul.fp32_precision``.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


@contextmanager
def set_matmul_precision(precision: str | None) -> Iterator[None]:
    """Set the precision in the block, if one is given, and restore the earlier one after it."""
    before = matmul_precision()
    if precision is not None:
        torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def set_cudnn_benchmark(*, enabled: bool) -> Iterator[None]:
    """Let cuDNN choose kernels by timing them in the block, if enabled, and restore the earlier setting after it."""
    cudnn: Any = torch.backends.cudnn
    before = cudnn.benchmark
    cudnn.benchmark = enabled or before
    try:
        yield
    finally:
        cudnn.benchmark = before


@contextmanager
def set_exact_convolutions(*, enabled: bool) -> Iterator[None]:
    """Compute convolutions without TF32 and by deterministic kernels in the block; or without cuDNN if not enabled.

    torch's own ``torch.backends.cudnn.flags`` raises once code has set one of the newer precisions.
    """
    cudnn: Any = torch.backends.cudnn
    before = cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.conv.fp32_precision
    cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.conv.fp32_precision = enabled, False, True, "ieee"
    try:
        yield
    finally:
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.conv.fp32_precision = before
