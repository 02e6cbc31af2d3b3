"""The other tasks on an agent's node, if the scheduler starts several there: they wait until the agent has ended.

The agent listens on an abstract Unix socket, and the other tasks connect to it. EOF means that the agent has exited:
the kernel closes the socket if the agent does not. No data is ever sent. Any user of the host may connect to such a
name, or bind it first. So each side checks the peer's user (SO_PEERCRED).
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from elaunch.agent.linux import credentials
from elaunch.launcher.schedulers.facts import Cluster

# The tasks start together, but one of them may take longer to read its modules from a slow disk.
_APPEAR_S = 60.0
_PAUSE_S = 0.1
# An agent that exits immediately, for example on a wrong option, waits for the others until this long after its start.
_SEEN_S = 5.0
# Connections that the kernel queues until the agent exits, without a thread that accepts them.
_BACKLOG = 1024
# The scheduler signals all processes of a step. A waiting task has nothing to stop. It must not end before the agent:
# the scheduler might take that for the end of the node (srun --kill-on-bad-exit, --wait).
_NOT_FOR_US = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def hold_other_tasks(cluster: Cluster, log: Callable[[str], None]) -> Iterator[None]:
    """For the agent, around all its work: the other tasks of its node wait until this context exits."""
    end_s = time.monotonic() + _SEEN_S
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(_address(cluster))
            listener.listen(_BACKLOG)
        except OSError as error:
            log(
                f"the other {cluster.tasks - 1} tasks of this node cannot wait for this agent, and may end before it"
                f" ({error.strerror}: another agent of this job, or another user, has the name)"
            )
            yield
            return
        try:
            yield
        finally:
            others = cluster.tasks - 1
            with suppress(OSError):
                while others:
                    listener.settimeout(max(end_s - time.monotonic(), 0))
                    with listener.accept()[0] as stream:
                        others -= credentials(stream)[1] == os.geteuid()


def wait_for_agent(cluster: Cluster, log: Callable[[str], None], appear_s: float = _APPEAR_S) -> int:
    """For the other tasks: wait until this node's agent has ended. Returns 0, as only the agent reports the result."""
    for signum in _NOT_FOR_US:
        signal.signal(signum, signal.SIG_IGN)
    end_s = time.monotonic() + appear_s
    while time.monotonic() < end_s:
        with socket.socket(socket.AF_UNIX) as stream:
            # Another user's listener that never accepts would block connect(): retry instead.
            stream.setblocking(False)
            with suppress(ConnectionRefusedError, FileNotFoundError, BlockingIOError):
                stream.connect(_address(cluster))
                if credentials(stream)[1] == os.geteuid():
                    stream.setblocking(True)
                    # A ConnectionError: the agent ended before it accepted this connection.
                    with suppress(ConnectionError):
                        while stream.recv(64):
                            pass
                    return 0
        time.sleep(_PAUSE_S)
    log(f"task {cluster.task} of this node has found no agent here within {appear_s:g} s: has it exited?")
    return 0


def _address(cluster: Cluster) -> str:
    """An abstract socket name. It is short, is known only on this host, needs no folder and leaves nothing behind."""
    job = f"{cluster.run_id}.{cluster.restarts}"
    return f"\0elaunch-agent-{os.geteuid()}-{hashlib.sha256(job.encode()).hexdigest()[:32]}"
