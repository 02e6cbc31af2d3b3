"""One worker's output stream on its way to the console, in whole lines with its rank's prefix, and to its file.

The console does not get tracebacks that add nothing. When one rank of 64 fails, 63 others print a traceback each about
a lost peer. After Ctrl-C, 64 ranks print one each about the KeyboardInterrupt. A bug of all ranks is printed 64
times. The log files and the failure records keep all.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elaunch.agent.own_lines import can_move_cursor
from elaunch.lines import split_lines, write_all

TAIL_BYTES_MAX = 64 << 10
# A person waits for a prompt, but a line is kept whole, even where its writer has to wait for a CPU: `print(a, b)`
# of an unbuffered worker is four writes, and the line of another rank between two of them ends it.
PARTIAL_LINE_WAIT_S = 0.5
_HIDE_CURSOR, _SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"
# A line's end that another line follows, and the moves and erasures with which a progress bar begins that line.
_MOVES = rb"(?:\x1b\[\d*[AGJK]|\x1b\[\?25[hl])*"
_BETWEEN = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?!" + _MOVES + rb"\Z)" + _MOVES)
_FIRST = re.compile(_MOVES)
# The mode of log files, less what the umask takes away. Output may show paths, arguments and data, so others may not
# read it.
MODE = 0o640

_TRACEBACK = b"Traceback (most recent call last):"
# A traceback comes in one go. If its exception is not of a lost peer, it is shown after this time.
_JUDGE_S = 0.1
# On a busy host the lines of one traceback may come this far apart.
_WHOLE_S = 1.0
# A rank that lost its peer exits within this time. If it does not, its program continues, and so does its output.
_EXIT_S = 5.0
_HELD_BYTES_MAX = 256 << 10
# torch.distributed puts the rank before each line.
_RANK_PREFIX = re.compile(rb"^\[rank\d+\]: ?", re.MULTILINE)
_SHOWN_MAX = 64


class Console:
    """One of this process's standard streams, shared by the ranks: no rank's line is cut by another's.

    `gone` is called once if nothing can be written any more: its reader is gone, or the disk is full. Later output of
    that stream is dropped. `is_terminal`: its cursor can be moved.
    """

    def __init__(self, fd: int, gone: Callable[[OSError], None]) -> None:
        self._fd = fd
        self._gone = gone
        self._open_line_of: WorkerStream | None = None
        self._hides_cursor = False
        self.is_terminal = can_move_cursor(fd)

    def write(self, data: bytes, writer: WorkerStream | None, prefix: bytes = b"") -> None:
        """Write `data`, each line with `prefix` (see `prefixed`).

        An open line of `writer` continues; one of another writer is ended.
        """
        if not data or self._fd < 0:
            return
        continued = writer is not None and self._open_line_of is writer
        ended = b"\n" if self._open_line_of is not None and not continued else b""
        data = ended + prefixed(data, prefix, continued=continued)
        self._open_line_of = writer if leaves_open(data) else None
        self._hides_cursor |= self.is_terminal and _HIDE_CURSOR in data
        self._send(data)

    def show_cursor(self) -> None:
        """Show the cursor again, if a rank was killed while it drew a progress bar and left it hidden."""
        if self._hides_cursor:
            self._send(_SHOW_CURSOR)

    def _send(self, data: bytes) -> None:
        try:
            write_all(self._fd, data)
        except OSError as error:
            self._fd = -1
            self._gone(error)


class LogFile:
    """A file that is written as long as it can be: a full disk costs one warning, never a worker.

    With `bytes_max` it is rotated at half that size: it replaces `NAME.1`, and a new file begins.
    """

    def __init__(self, path: str, warn: Callable[[str], None], mode: int = MODE, bytes_max: int = 0) -> None:
        self._path = path
        self._warn = warn
        self._mode = mode
        self._bytes_max = bytes_max
        self._begin_offset = self._end_offset = 0
        self._fd = -1
        try:
            self._open()
        except OSError as error:
            self._give_up(error)

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, self._mode)

    def write(self, data: bytes) -> bytes:
        """Write `data`. Returns the part that the file did not take."""
        rest = memoryview(data)
        try:
            if self._bytes_max and self._fd >= 0 and os.fstat(self._fd).st_size + len(data) > self._bytes_max // 2:
                self._rotate()
            self._end_offset += len(data)
            while rest and self._fd >= 0:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            self.close()
            self._give_up(error)
        return bytes(rest)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _rotate(self) -> None:
        """Rename the file to NAME.1 and begin a new one, whose first line counts the dropped bytes. Raises OSError."""
        older = Path(f"{self._path}.1")
        Path(self._path).replace(older)
        self.close()
        self._open()
        dropped = f"{self._begin_offset:,} bytes before that were dropped (--log-max-size)"
        os.write(self._fd, f"elaunch: older output is in {older.name}; {dropped}\n".encode())
        self._begin_offset = self._end_offset

    def _give_up(self, error: OSError) -> None:
        self._warn(f"{self._path} cannot be written ({error.strerror}); training continues without this log file")


class ShownTracebacks:
    """The tracebacks that the console has shown. An equal one of another rank or generation becomes one line."""

    def __init__(self) -> None:
        self._shown: dict[bytes, tuple[int, int]] = {}

    def once(self, traceback: bytes, generation: int, rank: int) -> bytes:
        """What the console shows of this rank's traceback."""
        while len(self._shown) >= _SHOWN_MAX:
            del self._shown[next(iter(self._shown))]
        text = _RANK_PREFIX.sub(b"", traceback)
        # A rank that is killed while it prints shows only the beginning.
        known = text in self._shown
        whole = text if known else next((shown for shown in self._shown if shown.startswith(text)), text)
        before, other = self._shown.setdefault(whole, (generation, rank))
        if (before, other) == (generation, rank):
            return traceback
        where = [f"rank {other}"] * (other != rank) + [f"in generation {before}"] * (before != generation)
        part = "the same" if whole == text else "the beginning of the same"
        return f"elaunch: rank {rank}: {part} traceback as {' '.join(where)}\n".encode()


class TracebackFold:
    """One worker's stderr on its way to the console.

    `judge(text)` is whether the tracebacks in `text` add nothing; None while the last is not complete. `once(text)` is
    the held text in the form that the console shows. `due_s` is when `flush` is due, on the clock of `now_s`; None if
    nothing is held.
    """

    def __init__(self, judge: Callable[[str], bool | None], once: Callable[[bytes], bytes] = bytes) -> None:
        self.due_s: float | None = None
        self._judge = judge
        self._once = once
        self._held = b""
        self._since_s = 0.0

    def take(self, data: bytes, now_s: float) -> bytes:
        """The part of `data` to show now."""
        shown = b""
        if not self._held:
            begin = data.find(_TRACEBACK)
            if begin < 0:
                return data
            line = data.rfind(b"\n", 0, begin) + 1
            shown, data = data[:line], data[line:]
            self._since_s, self.due_s = now_s, now_s + _JUDGE_S
        self._held += data
        return shown + self._release() if len(self._held) > _HELD_BYTES_MAX else shown

    def flush(self, now_s: float) -> bytes:
        """The part to show now that `due_s` has passed."""
        adds_nothing = self._judge(self._held.decode(errors="replace"))
        wait_s = {None: _WHOLE_S, True: _EXIT_S, False: 0.0}[adds_nothing]
        if now_s >= self._since_s + wait_s:
            return self._release()
        self.due_s = self._since_s + wait_s if adds_nothing else now_s + _JUDGE_S
        return b""

    def end(self) -> bytes:
        """The part of the rest to show, since the worker has exited."""
        if self._held and self._judge(self._held.decode(errors="replace")):
            self._held = b""
        return self._release()

    def _release(self) -> bytes:
        held, self._held, self.due_s = self._held, b"", None
        return self._once(held) if held else b""


@dataclass(eq=False)
class WorkerStream:
    """A pipe from a worker. All that it wrote goes to `console`, each line with `prefix`, and to `file`.

    `fd` is the pipe's reading end, which does not block. This object closes it and the files. With `keep_tail` the end
    of what was written is kept. With `file_first` the console gets only what the file does not take. Lines with one of
    `needles` are also copied to `needle_file`. With `whole_lines` partial lines are held back, since other workers
    write to the console too. `fold` holds back tracebacks on the console, `frame` formats lines for the console.
    """

    fd: int
    generation: int
    local_rank: int
    console: Console | None
    prefix: bytes = b""
    keep_tail: bool = False
    whole_lines: bool = False
    file: LogFile | None = None
    file_first: bool = False
    needles: tuple[bytes, ...] = ()
    needle_file: LogFile | None = None
    fold: TracebackFold | None = None
    frame: Callable[[bytes], bytes] | None = None
    _partial_at_s: float | None = None
    _rest: bytes = b""
    _tail: bytes = b""

    def fileno(self) -> int:
        return self.fd

    @property
    def flush_at_s(self) -> float | None:
        """When `flush` is due; None if nothing is held back."""
        due_s = (self._partial_at_s, self.fold.due_s if self.fold else None)
        return min((at_s for at_s in due_s if at_s is not None), default=None)

    def feed(self, data: bytes, now_s: float) -> None:
        """Pass `data` on: whole lines immediately, a partial line when its end comes or `flush_at_s` has passed."""
        if self.keep_tail:
            self._tail = (self._tail + data)[-TAIL_BYTES_MAX:]
        left = self.file.write(data) if self.file else data
        if self.file_first:
            data = left
            if not data:
                return
        if not (self.whole_lines or self.prefix or self.needles or self.frame):
            self._pass(data, now_s)
            return
        whole, self._rest = split_lines(self._rest + data)
        self._pass(whole, now_s)
        due_s = None if whole else self._partial_at_s
        self._partial_at_s = (due_s or now_s + PARTIAL_LINE_WAIT_S) if self._rest else None

    def flush(self, now_s: float) -> None:
        """Write what has been held back long enough: a partial line, a traceback."""
        if self._partial_at_s is not None and now_s >= self._partial_at_s:
            self._pass_rest(now_s)
        if self.fold and self.fold.due_s is not None and now_s >= self.fold.due_s:
            self._show_on_console(self.fold.flush(now_s))

    def tail(self) -> str:
        """The end of what was written, at most TAIL_BYTES_MAX."""
        return self._tail.decode(errors="replace")

    def close(self) -> None:
        self._pass_rest(0.0)
        if self.fold:
            self._show_on_console(self.fold.end())
        os.close(self.fd)
        for file in (self.file, self.needle_file):
            if file:
                file.close()

    def _pass_rest(self, now_s: float) -> None:
        rest, self._rest, self._partial_at_s = self._rest, b"", None
        self._pass(rest, now_s)

    def _pass(self, data: bytes, now_s: float) -> None:
        """Copy `data` to its destinations; the console gets it later if it is held back."""
        if self.needle_file and self.needles:
            lines = data.splitlines(keepends=True)
            self.needle_file.write(b"".join(line for line in lines if any(n in line for n in self.needles)))
        self._show_on_console(self.fold.take(data, now_s) if self.fold else data)

    def _show_on_console(self, data: bytes) -> None:
        if self.console and data:
            self.console.write(self.frame(data) if self.frame else data, self, self.prefix)


def prefixed(lines: bytes, prefix: bytes, *, continued: bool) -> bytes:
    """`lines` with `prefix` before each. `continued`: the first line continues a line printed before.

    The prefix of a progress bar comes after what erases the bar's last state.
    """
    if not prefix:
        return lines
    if b"\r" in lines or b"\x1b[" in lines:
        body = _BETWEEN.sub(lambda between: between[0] + prefix, lines)
        first = _moves(lines)
        return body if continued or first == len(lines) else body[:first] + prefix + body[first:]
    body = lines[:-1].replace(b"\n", b"\n" + prefix) + lines[-1:]
    return body if continued else prefix + body


def leaves_open(lines: bytes) -> bool:
    """Whether the last line has begun and has no end."""
    last = lines[max(lines.rfind(b"\n"), lines.rfind(b"\r")) + 1 :]
    return _moves(last) < len(last)


def _moves(line: bytes) -> int:
    """How many bytes of moves and erasures the line begins with."""
    found = _FIRST.match(line)
    return found.end() if found else 0


def is_pipe(fd: int) -> bool:
    """Whether the descriptor is a pipe, not a terminal, file or socket."""
    return stat.S_ISFIFO(os.fstat(fd).st_mode)


def is_one_pipe(one: int, other: int) -> bool:
    """Whether both descriptors are the same pipe."""
    return is_pipe(one) and os.path.samestat(os.fstat(one), os.fstat(other))
