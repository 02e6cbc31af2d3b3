"""What forked processes are and report, in real processes: a worker store, and a worker without free descriptors."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

from elaunch.agent.forkserver import wire
from tests.harness import DEADLINE_S, environment

STORE = """
import os, sys
from elaunch.agent.forkserver import child
os.dup2(int(sys.argv[1]), child.CONTROL_FD)
child.serve_store("127.0.0.1", 0, store_class=lambda *_, **__: None)
"""
REPORTS = """
import json, os, resource, socket, sys
from elaunch.agent.forkserver import reports
os.dup2(int(sys.argv[1]), reports.LINK_FD)
for fd in map(int, os.listdir("/proc/self/fd")):
    if fd > reports.LINK_FD:
        try: os.close(fd)
        except OSError: pass
resource.setrlimit(resource.RLIMIT_NOFILE, (reports.LINK_FD + 1, reports.LINK_FD + 1))
reports.send(os.fstat(reports.LINK_FD).st_ino, {"event": "note"})
assert os.fstat(reports.LINK_FD)
"""


def running(program: str, end: socket.socket) -> subprocess.Popen[bytes]:
    env = environment({"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    return subprocess.Popen([sys.executable, "-c", program, str(end.fileno())], env=env, pass_fds=(end.fileno(),))


def test_a_store_ends_when_the_agent_closes_its_control_socket() -> None:
    control, theirs = wire.pair()
    with theirs, running(STORE, theirs) as process:
        theirs.close()
        assert process.poll() is None
        control.close()
        assert process.wait(DEADLINE_S) == 0


def test_a_worker_without_a_free_descriptor_reports_on_its_link() -> None:
    link, theirs = socket.socketpair()
    with link, theirs, running(REPORTS, theirs) as process:
        assert process.wait(DEADLINE_S) == 0
        link.settimeout(DEADLINE_S)

        assert json.loads(link.recv(1000)) == {"event": "note"}
