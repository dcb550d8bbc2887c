"""Precision of fp32 matrix products, read and set in the words of `torch.set_float32_matmul_precision`."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
