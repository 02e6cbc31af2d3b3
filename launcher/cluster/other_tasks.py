"""The other tasks on an agent's node, if the scheduler starts several there: they wait until the agent has ended.

The agent listens on an abstract Unix socket, and the other tasks connect to it. The end of the stream tells them that
the agent has ended: the kernel closes the socket if the agent does not. No data is ever sent. Any user of the host may
connect to such a name, or take it first. So the name is derived from the key in this user's home and cannot be guessed,
and each side asks the kernel for the user at the other end.
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

# The tasks start together, but one of them may take longer to read its modules from a slow disk.
_APPEAR_S = 60.0
_PAUSE_S = 0.1
# An agent that ends at once, for example for a wrong option, waits until this long after its start for the others.
_SEEN_S = 5.0
# Connections that may wait to be accepted.
_BACKLOG = 128
# The scheduler signals all processes of a step. A waiting task has nothing to stop. It must not end before the agent:
# the scheduler might take that for the end of the node (srun --kill-on-bad-exit, --wait).
_NOT_FOR_US = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def seen_by_others(cluster: Cluster, say: Callable[[str], None]) -> Iterator[None]:
    """In the agent, around all its work: the other tasks of its node wait until this context ends."""
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
        listening = _TaskListener(listener, cluster.tasks - 1)
        try:
            yield
        finally:
            listening.close(begun_s + _SEEN_S)


def wait_for_agent(cluster: Cluster, say: Callable[[str], None], appear_s: float = _APPEAR_S) -> int:
    """In the other tasks: wait until this node's agent has ended. Returns 0, as only the agent reports the result."""
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


class _TaskListener:
    """Accepts the other tasks as they come, and refuses other users. Closes all connections at the end."""

    def __init__(self, listener: socket.socket, others: int) -> None:
        self._listener = listener
        self._others = others
        self._inside: list[socket.socket] = []
        self._all_are_in = threading.Event()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="elaunch-companions", daemon=True)
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

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                stream, _ = self._listener.accept()
            except OSError:
                # For example, no descriptor is free. Try again soon.
                self._is_closed.wait(_PAUSE_S)
                continue
            if _uid_behind(stream) != os.geteuid():
                stream.close()
                continue
            self._inside.append(stream)
            if len(self._inside) >= self._others:
                self._all_are_in.set()


def _address(cluster: Cluster) -> str:
    """An abstract socket name. It is short, is known only on this host, needs no folder and leaves nothing behind.

    Without a key in the user's home the name can be guessed.
    """
    job = f"{cluster.run_id}.{cluster.restarts}"
    name = token_at_home(f"companions of {job}", make=True) or hashlib.sha256(job.encode()).hexdigest()[:32]
    return f"\0elaunch-agent-{os.geteuid()}-{name}"


def _whose(address: str) -> str:
    """Words for the user who has taken the name, as far as the kernel tells."""
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
        # The agent ended before it accepted this connection.
        return
