"""Holds back tracebacks on the console that tell nothing new.

When one rank of 64 fails, 63 others print a traceback each about a lost peer. After Ctrl-C, 64 ranks print one each
about the KeyboardInterrupt. A bug that all ranks have comes 64 times. The log files and the failure records keep all.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_BEGIN = b"Traceback (most recent call last):"
# A traceback comes in one go. If its exception is no lost peer, it is shown after this time.
_LOOK_S = 0.1
# On a busy host the lines of one traceback may come this far apart.
_WHOLE_S = 1.0
# A rank that lost its peer ends within this time. If it does not, its program goes on, and so does its output.
_END_S = 5.0
_HELD_BYTES_MAX = 256 << 10
# torch.distributed puts the rank before each line.
_RANK = re.compile(rb"^\[rank\d+\]: ?", re.MULTILINE)
_SHOWN_MAX = 64


class ShownTracebacks:
    """The tracebacks that the console has got. One that is equal, of another rank or generation, becomes a line."""

    def __init__(self) -> None:
        self._shown: dict[bytes, tuple[int, int]] = {}

    def once(self, traceback: bytes, generation: int, rank: int) -> bytes:
        """The form of this rank's traceback that the console gets."""
        while len(self._shown) >= _SHOWN_MAX:
            del self._shown[next(iter(self._shown))]
        before, other = self._shown.setdefault(_RANK.sub(b"", traceback), (generation, rank))
        if (before, other) == (generation, rank):
            return traceback
        where = [f"rank {other}"] * (other != rank) + [f"in generation {before}"] * (before != generation)
        return f"elaunch: rank {rank}: the same traceback as {' '.join(where)}\n".encode()


class TracebackFold:
    """One worker's stderr on its way to the console.

    `judge(text)` says whether the tracebacks in `text` tell nothing new; None while the last is not complete.
    `once(text)` is the form in which the console gets what was held. `due_s` is when `look` is due, on the clock of
    `now_s`; None if nothing is held.
    """

    def __init__(self, judge: Callable[[str], bool | None], once: Callable[[bytes], bytes] = bytes) -> None:
        self.due_s: float | None = None
        self._judge = judge
        self._once = once
        self._held = b""
        self._since_s = 0.0

    def take(self, data: bytes, now_s: float) -> bytes:
        """What of `data` can be shown now."""
        shown = b""
        if not self._held:
            begin = data.find(_BEGIN)
            if begin < 0:
                return data
            line = data.rfind(b"\n", 0, begin) + 1
            shown, data = data[:line], data[line:]
            self._since_s, self.due_s = now_s, now_s + _LOOK_S
        self._held += data
        return shown + self._release() if len(self._held) > _HELD_BYTES_MAX else shown

    def look(self, now_s: float) -> bytes:
        """What is shown now that `due_s` has passed."""
        is_no_news = self._judge(self._held.decode(errors="replace"))
        wait_s = {None: _WHOLE_S, True: _END_S, False: 0.0}[is_no_news]
        if now_s >= self._since_s + wait_s:
            return self._release()
        self.due_s = self._since_s + wait_s if is_no_news else now_s + _LOOK_S
        return b""

    def end(self) -> bytes:
        """What is shown of the rest: the worker has ended."""
        if self._held and self._judge(self._held.decode(errors="replace")):
            self._held = b""
        return self._release()

    def _release(self) -> bytes:
        held, self._held, self.due_s = self._held, b"", None
        return self._once(held) if held else b""
