"""Several workers of a node write one region together: each copies the next stripe that nobody has copied.

After a failure each survivor has its own GPU, so together they copy several times as fast as one of them. A file says
what is being written, and which stripes are complete. For whatever only one worker may do at a time it holds a POSIX
lock on a byte of that file, which a SIGKILL releases: then another worker does it.

    byte 0        shared: this worker takes part; exclusive: nobody does
    byte 1        one worker declares the region whole
    byte 2 + i    one worker copies stripe i
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from elaunch.trainer.state.region import bytes_of

_TAKES_PART, _COMPLETES, _FIRST_STRIPE = 0, 1, 2
_POLL_S = 0.001
_PLAN = struct.Struct("<32sBBB")
# Stripes of one region, each with a byte in the file.
_STRIPES_MAX = 1 << 16

Pairs = tuple[list[Tensor], list[Tensor]]


@dataclass(frozen=True)
class JointPlan:
    """The write that is going on: a digest of the version and of where everything lies, and the number of the slot.

    `has_fixed` says that the tensors that do not change are in the slot already.
    """

    digest: bytes
    slot: int
    has_fixed: bool


class JointWrite:
    """This worker's part in a write; leaving the `with` block ends it. `limit_s` is how long it waits for others.

    All methods but `stripes` and `complete` are called with the node's lock held.
    """

    def __init__(self, path: Path, limit_s: float) -> None:
        self._path, self._limit_s = path, limit_s

    def __enter__(self) -> JointWrite:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def join(self, digest: bytes) -> JointPlan | None:
        """Take part in the write that is going on, if it is this one; else None."""
        found = os.pread(self._file, _PLAN.size, 0)
        if len(found) < _PLAN.size:
            return None
        there, slot, has_fixed, is_over = _PLAN.unpack(found)
        if there != digest or is_over:
            return None
        fcntl.lockf(self._file, fcntl.LOCK_SH, 1, _TAKES_PART)
        return JointPlan(there, slot, bool(has_fixed))

    def wait_until_alone(self) -> None:
        """Wait until nobody takes part in another write. Raises TimeoutError."""
        self._wait_for(lambda: self._is_mine(_TAKES_PART))

    def begin(self, plan: JointPlan) -> None:
        """Begin a write, after `wait_until_alone`: others may join when the node's lock is free."""
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, _PLAN.pack(plan.digest, plan.slot, plan.has_fixed, False), 0)
        fcntl.lockf(self._file, fcntl.LOCK_SH, 1, _TAKES_PART)

    def forget(self) -> None:
        """Nobody may join what was begun before."""
        os.ftruncate(self._file, 0)

    def stripes(self, count: int, first: int) -> Iterator[int]:
        """The stripes that this worker is to copy, from `first` on: each that nobody else has copied or is copying.

        It ends when all are complete, and raises TimeoutError if another worker takes too long for one.
        """
        missing = [(first + number) % count for number in range(count)]
        begun_s = time.monotonic()
        while missing:
            others = []
            for number in missing:
                if self._is_copied(number):
                    continue
                if not self._is_mine(_FIRST_STRIPE + number):
                    others.append(number)
                    continue
                # Another worker may have copied it between these two lines.
                if not self._is_copied(number):
                    yield number
                    os.pwrite(self._file, b"\1", _PLAN.size + number)
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _FIRST_STRIPE + number)
            if others == missing:
                self._require_time(begun_s)
                time.sleep(_POLL_S)
            else:
                begun_s = time.monotonic()
            missing = others

    def complete(self, finish: Callable[[], object]) -> None:
        """Declare the region whole by `finish`, unless another worker does. Raises TimeoutError."""
        self._wait_for(lambda: self._is_mine(_COMPLETES))
        if not os.pread(self._file, 1, _PLAN.size - 1)[0]:
            finish()
            os.pwrite(self._file, b"\1", _PLAN.size - 1)
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _COMPLETES)

    def _is_copied(self, number: int) -> bool:
        return os.pread(self._file, 1, _PLAN.size + number) == b"\1"

    def _is_mine(self, byte: int) -> bool:
        """Take the exclusive lock on that byte, if nobody has it."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _wait_for(self, fact: Callable[[], bool]) -> None:
        begun_s = time.monotonic()
        while not fact():
            self._require_time(begun_s)
            time.sleep(_POLL_S)

    def _require_time(self, begun_s: float) -> None:
        if time.monotonic() - begun_s > self._limit_s:
            reason = f"another worker of this node has held the lock for {self._limit_s:.1f} s; is it stopped?"
            raise TimeoutError(errno.ETIMEDOUT, reason, self._path)


def cut(targets: Sequence[Tensor], sources: Sequence[Tensor], offsets: Sequence[int], size: int) -> list[Pairs]:
    """Targets and sources by stripe: `size` bytes of the region each. Tensors at the borders are cut if they can be."""
    if not offsets:
        return []
    begin = offsets[0]
    end = max(at + source.nbytes for at, source in zip(offsets, sources, strict=True))
    size = max(size, -(-(end - begin) // _STRIPES_MAX))
    stripes: list[Pairs] = [([], []) for _ in range(max(1, -(-(end - begin) // size)))]
    for target, source, offset in zip(targets, sources, offsets, strict=True):
        at, length = offset - begin, source.nbytes
        if at // size == max(at, at + length - 1) // size or not (flat := _flat(target, source)):
            here = stripes[min(at // size, len(stripes) - 1)]
            here[0].append(target)
            here[1].append(source)
            continue
        done = 0
        while done < length:
            number = (at + done) // size
            until = min(length, (number + 1) * size - at)
            stripes[number][0].append(flat[0][done:until])
            stripes[number][1].append(flat[1][done:until])
            done = until
    return stripes


def _flat(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor] | None:
    """The bytes of both; None if they are in another order in one of them."""
    there, here = bytes_of(target), bytes_of(source)
    return None if there is None or here is None else (there, here)
