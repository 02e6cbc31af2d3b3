"""The loop of a fork server: it forks, signals and reaps as the agent asks, and forks ahead while nobody asks."""

from __future__ import annotations

import os
import selectors
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from elaunch.agent.forkserver import wire
from elaunch.agent.forkserver.boot import Boot
from elaunch.agent.forkserver.reaper import Children
from elaunch.agent.forkserver.standbys import Standbys, wait
from elaunch.agent.linux import read_signal, signal_fd

# The key of processes that were forked ahead, and the generation that none of them has yet.
_AHEAD, _NO_GENERATION = "ahead", -1
# What a program sends to its parent, as to a launcher that is to end. SIGKILL ends this process.
_ASKING = frozenset(
    (
        *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT),
        *(signal.SIGUSR1, signal.SIGUSR2),
    )
)

# What a process does right after the fork, with the pid of the fork server, and what it does ahead of its order.
Settle = Callable[[int], None]
Prepare = Callable[[], None]
# An order from the agent, the descriptors that came with it, the fork server's pid, and whether `Prepare` was done.
Asked = tuple[dict[str, Any], tuple[int, ...], int, bool]


def tell(control: socket.socket, news: dict[str, Any], end: Callable[[], object] = lambda: os._exit(1)) -> None:
    """Send news to the agent. If the agent is gone, this process and its children end too, by `end`."""
    try:
        wire.send(control, news)
    except (BrokenPipeError, ConnectionResetError):
        end()


class ForkLoop:
    """A fork server's service for its agent. Without `prepare` nothing is forked ahead."""

    def __init__(self, boot: Boot, control: socket.socket, settle: Settle, prepare: Prepare | None = None) -> None:
        self._boot = boot
        self._control = control
        self._settle = settle
        self._prepare = prepare
        self._pid = os.getpid()
        self._children = Children()
        self._standbys = Standbys()
        self._asking = _ASKING
        self._signals = -1
        # Where the system has none (a sandbox), a signal to this process is ignored.
        with suppress(OSError):
            self._signals = signal_fd(_ASKING)
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector = selectors.DefaultSelector()

    def serve(self) -> Asked:
        """Answer the agent until it is gone, then exit. Returns only in a child, with the order that made it.

        In this process it returns with the order "stay", which comes when the job is over.
        """
        ready: dict[str, Any] = {"event": "ready", "reason": self._boot.fallback, "left_out": self._boot.left_out}
        tell(self._control, ready)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(self._wake_r, selectors.EVENT_READ)
        if self._signals >= 0:
            self._selector.register(self._signals, selectors.EVENT_READ)
        while True:
            if asked := self._turn():
                return asked

    def _turn(self) -> Asked | None:
        """Wait for something to do, and do it. Returns an order in a forked process only."""
        waits_s = [wait_s for wait_s in (self._children.look_s, self._standbys.wait_s) if wait_s is not None]
        ready = [key.fileobj for key, _ in self._selector.select(min(waits_s, default=None))]
        if self._wake_r in ready:
            os.read(self._wake_r, 4096)
        if self._signals in ready:
            # Its sender may have ended since then, and has a name until that is told.
            self._tell_signal()
        # Each child is asked for, so not without a reason.
        if self._wake_r in ready or self._children.is_due:
            self._tell_ends()
        if self._control not in ready:
            return self._work_ahead() if self._prepare and self._standbys.wait_s == 0 else None
        packet = wire.receive(self._control)
        if packet is None:
            self._end()
        order, fds = packet
        match order["op"]:
            case "ask":
                tell(self._control, {"event": "here"})
            case "ahead":
                self._begin_ahead(order["count"])
            case "signal":
                names = {(order["generation"], key) for key in order["keys"]}
                self._children.signal(names, order["signum"], order["group"])
            case "stay":
                self._children.kill()
                self._release()
                return order, fds, self._pid, False
            case _:
                return self._fork(order, fds)
        return None

    def _tell_signal(self) -> None:
        signum, sender = read_signal(self._signals)
        is_user = signum in (signal.SIGUSR1, signal.SIGUSR2)
        if name := self._children.whose(sender) or (None if is_user else self._children.of_lost(sender)):
            news = {"event": "asked", "generation": name[0], "key": name[1], "pid": sender, "signum": signum}
            tell(self._control, news, self._end)
        elif is_user:
            # A scheduler's, to all processes: it stays pending, by which the agent knows (`Spawner.signal`).
            self._asking -= {signum}
            signal_fd(self._asking, self._signals)
            os.kill(self._pid, signum)

    def _tell_ends(self) -> None:
        for news in self._children.ended():
            if news["key"] == _AHEAD:
                self._standbys.forget(news["pid"])
            # An agent that uses another fork server now has closed the socket, perhaps before this news.
            tell(self._control, news, self._end)

    def _fork(self, order: dict[str, Any], fds: tuple[int, ...]) -> Asked | None:
        """Make a process for the order. Returns the order in that process."""
        news = {"generation": order["generation"], "key": order["key"]}
        try:
            pid = self._standbys.give(order, fds) or self._forked()
        except OSError as error:
            tell(self._control, {**news, "event": "unstarted", "why": error.strerror})
        else:
            if pid == 0:
                self._become_child()
                return order, fds, self._pid, False
            self._children.add(pid, (order["generation"], order["key"]))
            tell(self._control, {**news, "event": "forked", "pid": pid})
        for fd in fds:
            os.close(fd)
        return None

    def _forked(self) -> int:
        try:
            return os.fork()
        except OSError:
            # The dead that were not reaped count as processes too (`pids.max`, `ulimit -u`).
            self._children.reap()
            return os.fork()

    def _end(self) -> NoReturn:
        """End, with all children by the kernel. In a container there may be nobody else to reap those that are dead."""
        self._standbys.want(0)
        self._children.finish({(_NO_GENERATION, _AHEAD)})
        os._exit(0)

    def _begin_ahead(self, count: int) -> None:
        """Have so many processes that wait."""
        self._standbys.want(count if self._prepare else 0)

    def _work_ahead(self) -> Asked | None:
        """Fork a process that waits. Returns in that process the order that makes it a worker."""
        try:
            pid, end = self._standbys.fork()
        except OSError:
            # The next generation's workers are forked when they are needed, and the log has the reason then.
            return None
        if end:
            self._become_child()
            assert self._prepare
            self._prepare()
            return *wait(end), self._pid, True
        self._children.add(pid, (_NO_GENERATION, _AHEAD))
        tell(self._control, {"event": "forked", "generation": _NO_GENERATION, "key": _AHEAD, "pid": pid})
        return None

    def _become_child(self) -> None:
        """Have nothing of the fork server's but its memory."""
        self._release()
        # The program may use this fd again. If the socket object closed it, it would close the program's file.
        os.close(self._control.detach())
        self._settle(self._pid)

    def _release(self) -> None:
        signal.set_wakeup_fd(-1)
        self._selector.close()
        for fd in (self._wake_r, self._wake_w, *([self._signals] if self._signals >= 0 else [])):
            os.close(fd)
