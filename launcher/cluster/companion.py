"""The tasks beside a node's agent, where a scheduler starts several: they stay until it has ended.

The agent listens on a socket that has a name only within its host and is closed by the kernel at the latest. Whoever
is connected to it learns the agent's end from the end of the stream; nothing is ever said on it.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from elaunch.launcher.cluster.facts import Cluster

# The tasks start together; what one of them may need longer for is reading its modules from a slow disk.
_APPEAR_S = 60.0
_PAUSE_S = 0.1
# An agent that ends at once, as for a wrong option, waits so long since its start for the others to see it.
_SEEN_S = 5.0
# The scheduler tells all of a step's processes to stop: this one has nothing to stop, and must not end before the
# agent, or the scheduler might take that for the end of the node (srun --kill-on-bad-exit, --wait).
_NOT_FOR_US = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def seen_by_others(cluster: Cluster, say: Callable[[str], None]) -> Iterator[None]:
    """In the agent, around all that it does: what the others of its node hold on to."""
    begun_s = time.monotonic()
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(_address(cluster))
            listener.listen(cluster.tasks)
        except OSError as error:
            say(
                f"the other {cluster.tasks - 1} tasks of this node cannot wait for this agent ({error.strerror}: is"
                " there another one of this job?)"
            )
            yield
            return
        try:
            yield
        finally:
            _let_them_come(listener, cluster.tasks - 1, begun_s + _SEEN_S)


def wait_for_agent(cluster: Cluster, say: Callable[[str], None], appear_s: float = _APPEAR_S) -> int:
    """In the others: wait until the agent of this node has ended. 0: what became of the job is the agent's to say."""
    for signum in _NOT_FOR_US:
        signal.signal(signum, signal.SIG_IGN)
    end_s = time.monotonic() + appear_s
    while time.monotonic() < end_s:
        with socket.socket(socket.AF_UNIX) as stream:
            try:
                stream.connect(_address(cluster))
            except (ConnectionRefusedError, FileNotFoundError):
                time.sleep(_PAUSE_S)
                continue
            if _uid_behind(stream) == os.geteuid():
                _read_to_end(stream)
                return 0
        time.sleep(_PAUSE_S)
    say(f"task {cluster.task} of this node has met no agent here within {appear_s:g} s: has it ended?")
    return 0


def _address(cluster: Cluster) -> str:
    """An abstract name, known within its host only: it needs no folder, nothing is left of it, and it is short."""
    job = hashlib.sha256(str(cluster.run_id).encode()).hexdigest()[:32]
    return f"\0elaunch-agent-{os.geteuid()}-{job}"


def _let_them_come(listener: socket.socket, others: int, end_s: float) -> None:
    """Until each of the others has come, or it is time."""
    with suppress(OSError):
        for _ in range(others):
            listener.settimeout(max(end_s - time.monotonic(), 0))
            listener.accept()[0].close()


def _uid_behind(stream: socket.socket) -> int:
    """Anybody on the host may take the name."""
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
