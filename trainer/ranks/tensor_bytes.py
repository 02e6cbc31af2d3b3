"""The bytes of a tensor in host memory, without a copy."""

from __future__ import annotations

import ctypes

from torch import Tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """They are valid as long as the tensor is. It is contiguous. No NumPy is needed, which torch can do without."""
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
