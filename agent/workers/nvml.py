"""NVML, the NVIDIA driver's library, where nvidia-ml-py is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def opened_nvml() -> Iterator[Any]:
    """The module `pynvml` with NVML open until the block's end; None without the package or without a driver."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        yield None
        return
    try:
        yield nvml
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
