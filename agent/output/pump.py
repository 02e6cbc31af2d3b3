"""The thread that moves the workers' output, so that a slow terminal or disk never stops the agent's loop.

It decides nothing: it reads pipes in turn, a bounded piece of each, and writes to consoles and files.
"""

from __future__ import annotations

import fcntl
import os
import queue
import selectors
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import get_args

from elaunch.agent.config import Level
from elaunch.agent.output.streams import Console, WorkerStream, is_one_pipe, is_pipe
from elaunch.agent.own_lines import OwnLines, is_one_terminal

_READ_BYTES = 256 << 10
_LEVELS = get_args(Level)

# Called with the stderr tails by local rank.
Drained = Callable[[dict[int, str]], None]


class Pump:
    """Moves all streams of one agent, and the agent's own log lines, so that their order is kept.

    `lines` formats the latter; those below `least` are left out. `stdout` and `stderr` are shared with the
    streams. Call `start` once; `close` waits until everything is written.
    """

    def __init__(self, lines: OwnLines, least: Level = "info") -> None:
        self.lines = lines
        self._shown = _LEVELS[_LEVELS.index(least) :]
        self.stdout = Console(1, self._stdout_gone)
        # The agent's own lines may go where stdout goes (2>&1).
        self.stderr = (
            self.stdout
            if is_one_terminal(1, 2)
            else Console(2, lambda error: self._stdout_gone(error) if is_one_pipe(1, 2) else None)
        )
        self._when_closed: Callable[[], None] = lambda: None
        self._is_closed = threading.Event()
        self._todo: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_r, selectors.EVENT_READ)
        self._streams: list[WorkerStream] = []
        self._tails: dict[int, dict[int, str]] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="elaunch-output", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def when_stdout_closed(self, do: Callable[[], None]) -> None:
        """Call `do`, in any thread, when stdout is a pipe and its reader is gone; immediately if it already is."""
        self._when_closed = do
        if self._is_closed.is_set():
            do()

    def _stdout_gone(self, error: OSError) -> None:
        """A pipe that was closed on purpose (`| head`) ends the job. Another loss, such as a terminal's, does not."""
        if isinstance(error, BrokenPipeError) and is_pipe(1):
            self._is_closed.set()
            self._when_closed()
        else:
            self.log(f"stdout cannot be written ({error.strerror}); training continues without it", "warning")

    def log(self, line: str, level: Level = "info") -> None:
        """Write one line of the agent's own to stderr."""
        if level not in self._shown:
            return
        # Its time is now, however late it is written.
        data = self.lines.line(line, level)
        self.do(lambda: self.stderr.write(data, None))

    def write_report(self, text: str, record: Mapping[str, object]) -> None:
        """Write the report to stderr; nothing if `text` is empty."""
        data = self.lines.report(text, record) if text else b""
        self.do(lambda: self.stderr.write(data, None))

    def add(self, stream: WorkerStream) -> None:
        """Route the output of `stream` from now on."""
        self.do(lambda: self._add(stream))

    def drain(self, generation: int, drained: Drained) -> None:
        """Pass on all that is left in a generation's pipes and close them; `drained` is called in the pump's thread."""
        self.do(lambda: self._drain(generation, drained))

    def close(self, timeout_s: float | None = None) -> bool:
        """Wait until all is written, at most `timeout_s`. Returns whether all was."""

        def stop() -> None:
            self.stdout.show_cursor()
            self._closing = True

        self.do(stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def do(self, work: Callable[[], object]) -> None:
        """Have the pump's thread do `work` after all earlier work. May be called from any thread."""
        self._todo.put(work)
        # A full pipe already holds a wake-up.
        with suppress(BlockingIOError):
            os.write(self._wake_w, b"\0")

    def _run(self) -> None:
        while not self._closing:
            due = [s.flush_at_s for s in self._streams if s.flush_at_s is not None]
            timeout_s = max(0.0, min(due) - time.monotonic()) if due else None
            for key, _ in self._selector.select(timeout_s):
                if isinstance(key.fileobj, WorkerStream):
                    self._read(key.fileobj)
            self._work()
            now_s = time.monotonic()
            for stream in self._streams:
                if stream.flush_at_s is not None and stream.flush_at_s <= now_s:
                    stream.flush(now_s)

    def _work(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake_r, 4096)
        with suppress(queue.Empty):
            while True:
                work = self._todo.get_nowait()
                try:
                    work()
                except Exception:
                    # The agent waits for this thread; one bad piece of work must not end it.
                    self.stderr.write(traceback.format_exc().encode(errors="backslashreplace"), None)

    def _add(self, stream: WorkerStream) -> None:
        self._streams.append(stream)
        self._selector.register(stream, selectors.EVENT_READ)

    def _read(self, stream: WorkerStream) -> int:
        """Pass one piece on. Returns its number of bytes, 0 if nothing waits."""
        try:
            data = os.read(stream.fd, _READ_BYTES)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        if data:
            stream.feed(data, time.monotonic())
        else:
            self._finish(stream)
        return len(data)

    def _finish(self, stream: WorkerStream) -> None:
        self._selector.unregister(stream)
        self._streams.remove(stream)
        stream.close()
        if tail := stream.tail():
            self._tails.setdefault(stream.generation, {})[stream.local_rank] = tail

    def _drain(self, generation: int, drained: Drained) -> None:
        try:
            for stream in [s for s in self._streams if s.generation == generation]:
                # All writers are dead, so what is left fits in the pipe. If another process still writes, stop there.
                left = fcntl.fcntl(stream.fd, fcntl.F_GETPIPE_SZ)
                while left > 0 and (taken := self._read(stream)):
                    left -= taken
                if stream in self._streams:
                    self._finish(stream)
        finally:
            drained(self._tails.pop(generation, {}))
