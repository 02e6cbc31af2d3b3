"""The tasks beside a node's agent, where a scheduler starts several: they stay until it has ended.

The agent listens on a socket that has a name only within its host and is closed by the kernel at the latest. Whoever
is connected to it learns the agent's end from the end of the stream; nothing is ever said on it. Any user of
the host may connect to such a name, or take it first. So the name comes from the key in this user's home and cannot be
guessed, and each side asks the kernel who is at the other.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elaunch.launcher.cluster.cluster import Cluster
from elaunch.launcher.cluster.home_key import token_at_home

# The tasks start together; what one of them may need longer for is reading its modules from a slow disk.
_APPEAR_S = 60.0
_PAUSE_S = 0.1
# An agent that ends at once, as for a wrong option, waits so long since its start for the others to see it.
_SEEN_S = 5.0
# Connections that may wait to be accepted.
_BACKLOG = 128
# The scheduler tells all of a step's processes to stop: this one has nothing to stop, and must not end before the
# agent, or the scheduler might take that for the end of the node (srun --kill-on-bad-exit, --wait).
_NOT_FOR_US = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def seen_by_others(cluster: Cluster, say: Callable[[str], None]) -> Iterator[None]:
    """In the agent, around all that it does: what the others of its node hold on to."""
    begun_s = time.monotonic()
    address = _address(cluster)
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError as error:
            say(
                f"the other {cluster.tasks - 1} tasks of this node cannot wait for this agent, and may end before it"
                f" ({error.strerror}: {_whose(address)})"
            )
            yield
            return
        door = _Door(listener, cluster.tasks - 1)
        try:
            yield
        finally:
            door.close(begun_s + _SEEN_S)


def wait_for_agent(cluster: Cluster, say: Callable[[str], None], appear_s: float = _APPEAR_S) -> int:
    """In the others: wait until the agent of this node has ended. 0: what became of the job is the agent's to say."""
    for signum in _NOT_FOR_US:
        signal.signal(signum, signal.SIG_IGN)
    address = _address(cluster)
    end_s = time.monotonic() + appear_s
    stranger = ""
    while time.monotonic() < end_s:
        with socket.socket(socket.AF_UNIX) as stream:
            # Another user's listener that accepts nobody would make connect() wait: do not wait, but try again.
            stream.setblocking(False)
            try:
                stream.connect(address)
            except (ConnectionRefusedError, FileNotFoundError, BlockingIOError):
                time.sleep(_PAUSE_S)
                continue
            uid = _uid_behind(stream)
            if uid == os.geteuid():
                stream.setblocking(True)
                _read_to_end(stream)
                return 0
            stranger = f"; user id {uid}, who is not this user, has the socket of the agent"
        time.sleep(_PAUSE_S)
    say(f"task {cluster.task} of this node has met no agent here within {appear_s:g} s: has it ended?{stranger}")
    return 0


class _Door:
    """Accepts the other tasks as they come, and refuses other users. Closes all connections at the end."""

    def __init__(self, listener: socket.socket, others: int) -> None:
        self._listener = listener
        self._others = others
        self._inside: list[socket.socket] = []
        self._all_are_in = threading.Event()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._let_in, name="elaunch-companions", daemon=True)
        self._thread.start()

    def close(self, until_s: float) -> None:
        """Close all connections when each of the others has come, or at `until_s`."""
        self._all_are_in.wait(max(until_s - time.monotonic(), 0))
        self._is_closed.set()
        # This wakes a thread in accept(); closing does not.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for stream in self._inside:
            stream.close()

    def _let_in(self) -> None:
        while not self._is_closed.is_set():
            try:
                stream, _ = self._listener.accept()
            except OSError:
                # As when no descriptor is free: that passes.
                self._is_closed.wait(_PAUSE_S)
                continue
            if _uid_behind(stream) != os.geteuid():
                stream.close()
                continue
            self._inside.append(stream)
            if len(self._inside) >= self._others:
                self._all_are_in.set()


def _address(cluster: Cluster) -> str:
    """An abstract name, known within its host only: it needs no folder, nothing is left of it, and it is short.

    Without a home the name can be guessed.
    """
    job = f"{cluster.run_id}.{cluster.restarts}"
    name = token_at_home(f"companions of {job}", make=True) or hashlib.sha256(job.encode()).hexdigest()[:32]
    return f"\0elaunch-agent-{os.geteuid()}-{name}"


def _whose(address: str) -> str:
    """The user of a name that is taken, as far as the kernel tells."""
    with socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(1.0)
        try:
            stream.connect(address)
            uid = _uid_behind(stream)
        except OSError:
            return "who uses the name cannot be seen"
    return "is there another agent of this job?" if uid == os.geteuid() else f"user id {uid} uses the name"


def _uid_behind(stream: socket.socket) -> int:
    """The user id of the process at the other end, as of when it began to listen, or connected."""
    pid_uid_gid = struct.Struct("3i")
    _, uid, _ = pid_uid_gid.unpack(stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, pid_uid_gid.size))
    return int(uid)


def _read_to_end(stream: socket.socket) -> None:
    try:
        while stream.recv(64):
            pass
    except ConnectionError:
        # Never accepted: that is how its end looks then.
        return
