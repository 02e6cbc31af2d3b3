"""Holds back tracebacks on the console that tell nothing new.

When one rank of 64 fails, 63 others print a traceback each about a lost peer. After Ctrl-C, 64 ranks print one each
about the KeyboardInterrupt. A bug that all ranks have comes 64 times in each generation. The log files and the failure
records keep all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

from elaunch.rendezvous.texts import listed

_BEGIN = b"Traceback (most recent call last):"
# A script that Python cannot compile has no frame, and so no such line.
_UNCOMPILED = re.compile(rb"^  File \".*\", line \d+$", re.MULTILINE)
# A traceback that ends with a KeyboardInterrupt, and what joins it to the one before it. torch.distributed puts the
# rank before each line.
_INTERRUPT = re.compile(
    rb"""
    (?: ^(?:\[rank\d+\]:)? [ ]* \n
        ^(?:\[rank\d+\]:[ ])? (?:During\ handling\ of|The\ above\ exception\ was) [^\n]* exception[^\n]*: \n
        ^(?:\[rank\d+\]:)? [ ]* \n )?
    ^(?:\[rank\d+\]:[ ])? Traceback\ \(most\ recent\ call\ last\): \n
    (?: ^(?:\[rank\d+\]:[ ])? [ ] [^\n]* \n )+
    ^(?:\[rank\d+\]:[ ])? KeyboardInterrupt (?: :[^\n]*)? (?: \n | \Z )
    """,
    re.MULTILINE | re.VERBOSE,
)
_PREFIX = re.compile(rb"^\[rank\d+\]:[ ]", re.MULTILINE)
_STACKS_MAX = 32
# A traceback that ends so many lines above is still on the screen.
_NEAR_LINES = 50
# A traceback comes in one go. If its exception is no lost peer, it is shown after this time.
_LOOK_S = 0.1
# On a busy host the lines of one traceback may come this far apart.
_WHOLE_S = 1.0
# A rank that lost its peer ends within this time. If it does not, its program goes on, and so does its output.
_END_S = 5.0
_HELD_BYTES_MAX = 256 << 10
_RANKS_SHOWN = 8


class ShownTracebacks:
    """The tracebacks that the console has. One that comes again, from any rank and in any generation, is a line.

    `lines` counts what has been written to the console.
    """

    def __init__(self, lines: Callable[[], int]) -> None:
        self._lines = lines
        # By the stack: the generation, the rank, what was raised there, and the line of the console.
        self._shown: dict[bytes, tuple[int, int, bytes, int]] = {}

    def once(self, text: bytes, generation: int, rank: int, *, is_alone: bool = False) -> bytes:
        """The form of `text`, of this rank, that is now written to the console.

        What a worker that `is_alone` repeats in one generation stays, as under Python.
        """
        return _whole().sub(lambda found: self._once(found[0], generation, rank, is_alone), text)

    def near(self, traceback: str) -> str:
        """Where this traceback, or its stack at least, stands a few lines above; empty if it does not."""
        stack, raised = _parts(traceback.encode(errors="replace"))
        generation, rank, shown, line = self._shown.get(stack, (0, 0, None, 0))
        # Another type of exception is another failure.
        if shown is None or shown.split(b":")[0] != raised.split(b":")[0] or self._lines() - line > _NEAR_LINES:
            return ""
        # The message is in the report's first lines. The console's may have other numbers, or another form.
        what = "" if shown == raised else "the stack is "
        return f"{what}printed above by rank {rank} in generation {generation}"

    def _once(self, traceback: bytes, generation: int, rank: int, is_alone: bool) -> bytes:
        stack, raised = _parts(traceback)
        if not stack:
            return traceback
        torn = (known for whole, known in self._shown.items() if not raised and whole.startswith(stack))
        # A worker that is stopped while it prints leaves the begin of one.
        if known := self._shown.get(stack) or next(torn, None):
            before, other, shown, _ = known
            if is_alone and before == generation:
                return traceback
            where = [f"rank {other}"] * (other != rank) + [f"in generation {before}"] * (before != generation)
            same = (rank, " ".join(where or ["before"]).encode())
            if raised in (shown, b""):
                return b"elaunch: rank %d: the same traceback as %b\n" % same
            lines = traceback.splitlines(keepends=True)[-raised.count(b"\n") - 1 :]
            return b"elaunch: rank %d: the same stack as %b, but:\n%b" % (*same, b"".join(lines))
        if len(self._shown) == _STACKS_MAX:
            del self._shown[next(iter(self._shown))]
        self._shown[stack] = generation, rank, raised, self._lines() + traceback.count(b"\n")
        return traceback


@cache
def _whole() -> re.Pattern[bytes]:
    """Finds whole tracebacks, with those that they are chained to. Below torch's prefix all lines belong to it.

    An exception of a DataLoader's worker has that worker's traceback in its message. Made when the first one comes.
    """
    begin = rb"Traceback \(most recent call last\):\n"
    frames, raised = rb"(?:^[ \t].*(?:\n|\Z))*", rb"^[A-Za-z_].*(?:\n|\Z)"
    body = rb"%b(?:%b%b(?:^Original %b%b%b)?)?" % (frames, raised, frames, begin, frames, raised)
    joint = rb"^\n^(?:During handling of|The above exception was).*\n^\n"
    plain = rb"^%b%b(?:%b^%b%b)*" % (begin, body, joint, begin, body)
    group = rb"  \+ Exception Group %b" % begin
    prefixed = rb"^\[rank\d+\]: (?:%b|%b)(?:^\[rank\d+\]: .*(?:\n|\Z))*" % (begin, group)
    uncompiled = rb'^  File ".*", line \d+\n%b%b' % (frames, raised)
    return re.compile(rb"%b|%b|^%b%b|%b" % (prefixed, plain, group, frames, uncompiled), re.MULTILINE)


def _parts(traceback: bytes) -> tuple[bytes, bytes]:
    """The traceback up to its last frame, and the exception, which may name another number in each rank."""
    plain = _PREFIX.sub(b"", traceback).rstrip()
    last = plain.rfind(b"\n ")
    end = (plain.find(b"\n", last + 1) + 1 or len(plain)) if last >= 0 else 0
    return plain[:end], plain[end:]


class TracebackFold:
    """One worker's stderr on its way to the console.

    `judge(text)` says whether the tracebacks in `text` tell of a lost peer only; None while the last is not complete.
    `is_interrupted()` says that the worker has got SIGINT, so that its KeyboardInterrupt is no news. `once(text)` is
    the form in which the console gets a traceback that is shown. `due_s` is when `look` is due, on the clock of
    `now_s`; None if nothing is held. `folded` counts lines never shown.
    """

    def __init__(
        self,
        judge: Callable[[str], bool | None],
        is_interrupted: Callable[[], bool] = lambda: False,
        once: Callable[[bytes], bytes] = bytes,
    ) -> None:
        self.due_s: float | None = None
        self.folded = 0
        self._judge = judge
        self._is_interrupted = is_interrupted
        self._once = once
        self._held = b""
        self._since_s = 0.0

    def take(self, data: bytes, now_s: float) -> bytes:
        """What of `data` can be shown now."""
        shown = b""
        if not self._held:
            begin = data.find(_BEGIN)
            if begin < 0 and b'  File "' in data and (found := _UNCOMPILED.search(data)):
                begin = found.start()
            if begin < 0:
                return data
            line = data.rfind(b"\n", 0, begin) + 1
            shown, data = data[:line], data[line:]
            self._since_s, self.due_s = now_s, now_s + _LOOK_S
        self._held += data
        return shown + self._release() if len(self._held) > _HELD_BYTES_MAX else shown

    def look(self, now_s: float) -> bytes:
        """What is shown now that `due_s` has passed."""
        rest = self._without_interrupts()
        is_no_news = self._judge(rest.decode(errors="replace")) if _BEGIN in rest else not _UNCOMPILED.search(rest)
        wait_s = {None: _WHOLE_S, True: _END_S, False: 0.0}[is_no_news]
        if now_s >= self._since_s + wait_s:
            return self._release()
        self.due_s = self._since_s + wait_s if is_no_news else now_s + _LOOK_S
        return b""

    def end(self) -> bytes:
        """What is shown of the rest: the worker has ended."""
        if self._held:
            rest = self._without_interrupts()
            if _BEGIN in rest and self._judge(rest.decode(errors="replace")):
                rest = b""
            self.folded += self._held.count(b"\n") - rest.count(b"\n")
            self._held = rest
        return self._release()

    def _without_interrupts(self) -> bytes:
        """The held text, without tracebacks of a KeyboardInterrupt that is no news."""
        return _INTERRUPT.sub(b"", self._held) if self._is_interrupted() else self._held

    def _release(self) -> bytes:
        held, self._held, self.due_s = self._held, b"", None
        return self._once(held)


def said_of_folded(lines: dict[int, int], *, is_interrupted: bool) -> str:
    """What the log says of tracebacks that the console did not get. `lines` counts their lines by rank."""
    ranks = [str(rank) for rank in sorted(lines)]
    their, are = ("its traceback", "is") if len(ranks) == 1 else ("their tracebacks", "are")
    how = "lost a peer"
    if is_interrupted:
        how = "was interrupted" if len(ranks) == 1 else "were interrupted"
    if len(ranks) > _RANKS_SHOWN:
        ranks = [*ranks[:_RANKS_SHOWN], f"{len(ranks) - _RANKS_SHOWN} more"]
    count = sum(lines.values())
    hidden = f"{their} ({count} lines) {are} not shown (-v shows all)"
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)} {how} and ended; {hidden}"
