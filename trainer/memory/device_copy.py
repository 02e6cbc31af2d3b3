"""Copies from the GPU, even while the training's own stream is stuck in a collective. Tested on one GPU (docs/gpu.md).

While a collective is stuck, nothing may wait for the training's stream, and nothing may allocate: the driver can make
an allocation wait for all kernels. So everything runs on a stream of its own, through memory that was pinned before.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from elaunch.trainer.memory.slots import copy_on_host
from elaunch.trainer.state.region import bytes_of

Pairs = list[tuple[Tensor, Tensor]]

_STAGING_BYTES = 32 << 20
# Between two checks of the stream, and of the groups, while a commit waits for its gradients.
_POLL_S, _CHECK_S = 0.0001, 0.2


def copy_from_devices(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target in host memory, on the current streams."""
    with torch.no_grad():
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=True)
    for device in {tensor.device for tensor in sources if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


class HostCopies:
    """State in host memory: it is always up to date."""

    def bind_thread(self) -> None:
        """Nothing to choose."""

    def before_commit(self, check: Callable[[], object]) -> None:
        """There is nothing to wait for, and gloo's collectives raise errors."""

    def after_commit(self) -> None:
        """Nothing to remember."""

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """The state is read as it is."""
        return contextlib.nullcontext()

    copy = staticmethod(copy_on_host)


class GpuCopies:
    """State on `device`, which executes asynchronously. `cuda` is `torch.cuda`."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda, staging: PinnedBuffers | None = None) -> None:
        self._device, self._cuda = device, cuda
        self._stream: Any = cuda.Stream(device)
        self._staging = staging or PinnedBuffers()
        self._committed: Any = None

    def bind_thread(self) -> None:
        """Choose the device for the calling thread. Without it, its first call would initialize CUDA on GPU 0."""
        self._cuda.set_device(self._device)

    def before_commit(self, check: Callable[[], object]) -> None:
        """Wait until the gradients are complete. `check` raises if a collective has failed, and is called meanwhile.

        Otherwise, when a collective never ends, the state on the host (step counters, learning rate) would be ahead of
        the state on the device. An aborted collective ends, so `check` is called after the wait too.
        """
        if self._cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a commit was begun while a CUDA graph was being captured: the steps that the graph makes later would "
                "not be kept; capture first, and put graph.replay() into `with keeper.commit():`"
            )
        complete = self._cuda.current_stream(self._device).record_event()
        check_s = time.monotonic() + _CHECK_S
        while not complete.query():
            time.sleep(_POLL_S)
            if time.monotonic() > check_s:
                check()
                check_s = time.monotonic() + _CHECK_S
        check()

    def after_commit(self) -> None:
        """Remember the point in the stream at which the new state is complete, before the next collective."""
        self._committed = self._cuda.current_stream(self._device).record_event()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """In this block the state is read on a separate stream, which waits for the last commit but for no collective.

        Reading a number (`GradScaler.state_dict` does) waits for the current stream.
        """
        with self._cuda.stream(self._stream):
            if self._committed is not None:
                self._stream.wait_event(self._committed)
            yield

    def copy(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        """Copy each source into its target in host memory, on the separate stream."""
        pairs = list(zip(targets, sources, strict=True))
        on_host = [pair for pair in pairs if pair[1].is_cpu]
        copy_on_host([target for target, _ in on_host], [source for _, source in on_host])
        with self.reading(), torch.no_grad():
            self._staging.copy([pair for pair in pairs if not pair[1].is_cpu], self._stream)


def pinned(size: int) -> Tensor:
    """Bytes of host memory that the device can write while the host does something else."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def begin_copy(target: Tensor, source: Tensor) -> None:
    """Add a copy to the current stream."""
    target.copy_(source, non_blocking=True)


class PinnedBuffers:
    """Two pinned buffers: while the device fills one, the host empties the other."""

    def __init__(
        self,
        size: int = _STAGING_BYTES,
        allocate: Callable[[int], Tensor] = pinned,
        begin: Callable[[Tensor, Tensor], None] = begin_copy,
    ) -> None:
        self._buffers = [allocate(size), allocate(size)]
        self._begin = begin

    def copy(self, pairs: Pairs, stream: Any) -> None:
        """Copy the second of each pair into the first, which is in host memory. `stream` is the current stream."""
        # The parts in flight: the event after each, its staging buffer, and its target.
        in_flight: deque[tuple[Any, Tensor, Tensor]] = deque()
        size, number = self._buffers[0].numel(), 0
        for target, source in pairs:
            flat_target, flat_source = bytes_of(target), bytes_of(source)
            if flat_target is None or flat_source is None:
                # One of them is not contiguous, or is a conjugate or negative view.
                target.copy_(source)
                continue
            for begin in range(0, flat_source.numel(), size):
                part, into = flat_source[begin : begin + size], flat_target[begin : begin + size]
                if len(in_flight) == len(self._buffers):
                    _land(*in_flight.popleft())
                staged = self._buffers[number % 2][: part.numel()]
                self._begin(staged, part)
                in_flight.append((stream.record_event(), staged, into))
                number += 1
        while in_flight:
            _land(*in_flight.popleft())


def _land(arrival: Any, staged: Tensor, target: Tensor) -> None:
    """Empty a buffer, once its part has arrived."""
    arrival.synchronize()
    target.copy_(staged)
