"""Copies from the GPU, even while the training's own stream is stuck in a collective. Not run on a GPU yet."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from elaunch.trainer.memory.slots import copy_on_host


def copy_from_devices(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target in host memory, in the order of the present streams."""
    with torch.no_grad():
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=True)
    for device in {tensor.device for tensor in sources if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


class HostCopies:
    """State in host memory: it is always up to date."""

    def before_commit(self) -> None:
        """Nothing to wait for."""

    def after_commit(self) -> None:
        """Nothing to remember."""

    copy = staticmethod(copy_on_host)


class GpuCopies:
    """State on `device`, which executes asynchronously."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._committed: Any = None

    def before_commit(self) -> None:
        """Wait until the gradients are complete.

        Otherwise, when a collective never ends, the state on the host (step counters, learning rate) would be ahead of
        the state on the device.
        """
        torch.cuda.current_stream(self._device).record_event().synchronize()

    def after_commit(self) -> None:
        """Remember the point in the stream at which the new state is complete, before the next collective."""
        self._committed = torch.cuda.current_stream(self._device).record_event()

    def copy(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        """Copy on a separate stream, which waits for the last commit but for no collective."""
        with torch.cuda.stream(self._stream):
            if self._committed is not None:
                self._stream.wait_event(self._committed)
            if targets:
                torch._foreach_copy_(targets, sources, non_blocking=True)
        self._stream.synchronize()
