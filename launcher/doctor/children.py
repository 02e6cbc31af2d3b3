"""Runs each check in a child process of its own: one that hangs or crashes costs its own line, and nothing else."""

from __future__ import annotations

import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

_READ_BYTES = 1 << 16
_REAP_S = 0.5


@dataclass(frozen=True)
class Task:
    """`work` returns facts, or raises; it has `limit_s` seconds."""

    work: Callable[[], object]
    limit_s: float


@dataclass(frozen=True)
class Unfinished:
    """A check that has no result. `why` is the end of a sentence; `is_late` says that its time was over."""

    why: str
    is_late: bool = False


def run_all(tasks: Mapping[str, Task]) -> dict[str, object]:
    """The results of all tasks, by name: what the work returned, or `Unfinished`.

    Call it from a process with one thread: it forks.
    """
    # Each child would import it.
    import elaunch.agent.linux  # noqa: F401

    started = {name: TaskProcess(task) for name, task in tasks.items()}
    try:
        _await(started.values())
        return {name: child.result() for name, child in started.items()}
    finally:
        for child in started.values():
            child.end()


class TaskProcess:
    """One task in a process of its own, whose group ends with it."""

    def __init__(self, task: Task) -> None:
        self.limit_s = task.limit_s
        self.until_s = time.monotonic() + task.limit_s
        self.fd, write_end = os.pipe2(os.O_CLOEXEC)
        self._data = bytearray()
        self._is_over = False
        self._is_reaped = False
        self._lock = threading.Lock()
        parent = os.getpid()
        self._pid = os.fork()
        if not self._pid:
            _live(task, write_end, parent)
        os.close(write_end)
        with suppress(OSError):
            os.setpgid(self._pid, self._pid)

    def read(self) -> bool:
        """Take what has arrived. Whether the child has said all; blocks if nothing has arrived."""
        data = os.read(self.fd, _READ_BYTES)
        self._data += data
        self._is_over = not data
        return self._is_over

    def result(self) -> object:
        """What the work returned, or `Unfinished`."""
        import pickle

        if not self._is_over:
            return Unfinished(f"no answer within {self.limit_s:g} s", is_late=True)
        with suppress(Exception):
            return pickle.loads(self._data)
        self.end()
        return Unfinished("its process ended without an answer")

    def wait(self) -> object:
        """The result, once it is there or the time is over."""
        _await([self])
        found = self.result()
        self.end()
        return found

    def kill(self) -> None:
        """End the child and what it has started, from any thread. Another thread that waits for it goes on."""
        with self._lock:
            if self._is_reaped:
                return
            with suppress(OSError):
                os.killpg(self._pid, signal.SIGKILL)
            with suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)

    def end(self) -> None:
        """End the child, and reap it. A process that not even SIGKILL ends is left to the kernel."""
        self.kill()
        with self._lock:
            if self._is_reaped:
                return
            self._is_reaped = True
            os.close(self.fd)
            from elaunch.agent.linux import end_of

            # One that hangs in the kernel ends perhaps never.
            with suppress(OSError), selectors.DefaultSelector() as selector:
                ended = end_of(self._pid)
                selector.register(ended, selectors.EVENT_READ)
                selector.select(_REAP_S)
                os.close(ended)
            with suppress(ChildProcessError):
                os.waitpid(self._pid, os.WNOHANG)


def _await(children: Iterable[TaskProcess]) -> None:
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.fd, selectors.EVENT_READ, child)
        while waiting := [key.data for key in selector.get_map().values()]:
            now_s = time.monotonic()
            for child in waiting:
                if child.until_s <= now_s:
                    selector.unregister(child.fd)
            due_s = min((child.until_s for child in waiting), default=now_s)
            for key, _ in selector.select(max(due_s - now_s, 0.0)):
                if key.data.read():
                    selector.unregister(key.fd)


def _live(task: Task, write_end: int, parent: int) -> None:
    """The child's life. Nothing of it reaches the terminal."""
    try:
        os.setpgid(0, 0)
        # Imported here, as pickle below: the launcher, which has a child for its health check, starts sooner without.
        from elaunch.agent.linux import die_with_parent

        die_with_parent(parent, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(nowhere, fd)
        try:
            said = task.work()
        except BaseException as error:
            said = Unfinished(f"the check failed ({type(error).__name__}: {error})")
        import pickle

        with open(write_end, "wb") as pipe:
            pickle.dump(said, pipe)
    finally:
        os._exit(0)
