"""The memory of a worker: what it may take, what it has taken, and the most that it has taken for a while.

On a CPU the limit is the cgroup's or the machine's, shared by the workers of the node. Memory that the kernel can drop
(pages of files) does not count. On a GPU the limit is the device's.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from dataclasses import dataclass
from pathlib import Path

import torch

from elaunch.trainer.memory.room import SPARE_SHARE, Room, shared_by, tightest_room

# Numbers of glibc's malloc.h.
_M_MMAP_THRESHOLD = -3
_MMAP_BYTES = 64 << 10
_STATUS, _FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_ROLLUP = Path("/proc/self/smaps_rollup")


@dataclass(frozen=True)
class WorkerRoom:
    """The bytes that a worker may take in all, those that are taken by now, and in words what limits it."""

    most: int
    taken: int
    where: str


def worker_room(device: torch.device, workers_of_node: int, node: Room | None = None) -> WorkerRoom:
    """What this worker may take. All workers of the node have come as far. `node` is its room, for tests."""
    if device.type == "cuda":
        give_back_freed()
        free, total = torch.cuda.mem_get_info(device)
        where = f"{torch.cuda.get_device_name(device)} has {total / 1e9:.1f} GB"
        return WorkerRoom(int(total * (1 - SPARE_SHARE)), total - free, where)
    node = node or tightest_room()
    # Each worker may write to the pages that it shares with its fork server, and then has them for itself; when it ends
    # it does. A second fork server with more imports is as large (decision 046).
    forked = _forked_bytes()
    taken = (node.used + forked) // workers_of_node + forked
    return WorkerRoom(node.most // workers_of_node, taken, shared_by(workers_of_node, node))


class PeakMeter:
    """The most memory that this process takes between `begin` and `peak`, above what it had at `start`.

    `left` is the memory that earlier trials have not given back: the process's at the last `start`, less that when the
    meter was made.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        give_back_freed()
        self._first = self._before = self._now()

    @property
    def left(self) -> int:
        return max(0, self._before - self._first)

    def start(self) -> None:
        """Measure from here on: the memory that is in use at this moment does not count."""
        give_back_freed()
        self._before = self._now()

    def begin(self) -> None:
        """Forget the peak so far: from now on the most counts."""
        give_back_freed()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            # Where this is not allowed, the peak is that of the process's whole life: too much, never too little.
            with contextlib.suppress(OSError):
                _FORGET.write_text("5")

    def peak(self) -> int:
        """The most since `begin`."""
        if self._device.type == "cuda":
            return max(0, torch.cuda.max_memory_reserved(self._device) - self._before)
        status = _sizes(_STATUS)
        return max(0, status["VmHWM"] - status["RssFile"] - status["RssShmem"] - self._before)

    def _now(self) -> int:
        return torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else _anonymous_bytes()


def keep_little_of_what_is_freed() -> None:
    """From now on each tensor of some size goes back to the kernel when it is freed.

    Otherwise glibc keeps up to twice of what the tensors take, and no estimate can tell how much.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)


def give_back_freed() -> None:
    """Give what was freed back to the kernel, as far as the C library can, and to the GPU."""
    gc.collect()
    # The caching allocator keeps it, and a later measurement would find room in it that counts as taken before.
    torch.cuda.empty_cache()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _forked_bytes() -> int:
    """What this process shares with the one that it was forked from, until one of the two writes to it."""
    try:
        return _sizes(_ROLLUP)["Shared_Dirty"]
    except (OSError, KeyError):
        # All of it may be shared.
        return _anonymous_bytes()


def _anonymous_bytes() -> int:
    return _sizes(_STATUS)["RssAnon"]


def _sizes(file: Path) -> dict[str, int]:
    """The sizes in a file that is written as /proc/self/status, in bytes."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if words[2:] == ["kB"]}
