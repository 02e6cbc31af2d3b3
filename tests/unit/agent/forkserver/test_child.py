"""The worker store: a store to which no rank connects imports nothing of torch. Real processes."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elaunch.agent.forkserver import wire
from tests.harness import DEADLINE_S

REPOSITORY = Path(__file__).parents[4]
# Idle until somebody does something. Who then imports torch ends with that code.
PROGRAM = """
import os, sys
from elaunch.agent.forkserver import child
for fd, number in zip(map(int, sys.argv[1:]), (child.LISTEN_FD, child.CONTROL_FD)):
    os.dup2(fd, number)
child._IDLE_S = 600.0
child._class = lambda *_, **__: os._exit(7)
child.serve_store("127.0.0.1", 0, store_class=STORE_CLASS)
"""
CLASS = "(lambda *_, **__: type('Store', (), {'num_keys': lambda _: 3})())"


@contextmanager
def started(store_class: str) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket, socket.socket]]:
    """A store; the socket at which it listens, and the agent's end of its control socket."""
    program = PROGRAM.replace("STORE_CLASS", store_class)
    control, theirs = wire.pair()
    with socket.create_server(("127.0.0.1", 0)) as listener, control, theirs:
        # Above the numbers that they get.
        fds = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (listener, theirs)]
        with subprocess.Popen([sys.executable, "-c", program, *map(str, fds)], cwd=REPOSITORY, pass_fds=fds) as process:
            for end in fds:
                os.close(end)
            theirs.close()
            control.settimeout(DEADLINE_S)
            yield process, listener, control
            process.kill()


def test_a_store_that_ends_before_a_rank_connects_imports_nothing() -> None:
    with started("None") as (process, _, control):
        control.close()

        assert process.wait(DEADLINE_S) == 0


def test_a_store_starts_when_a_rank_connects() -> None:
    with started("None") as (process, listener, _), socket.create_connection(listener.getsockname()):
        assert process.wait(DEADLINE_S) == 7


def test_a_store_that_has_its_class_imports_nothing_and_waits_for_nobody() -> None:
    with started(CLASS) as (process, _, control):
        assert wire.receive(control) == ({"up": True}, ())
        wire.send(control, {"op": "end"})

        assert wire.receive(control) == ({"keys": 3}, ())
        assert process.wait(DEADLINE_S) == 0
