"""When the fork server reports the exits of its children, and what these report, with real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from elaunch.agent.forkserver import wire
from elaunch.agent.forkserver.server import Children
from elaunch.agent.linux import state
from tests.harness import DEADLINE_S, environment, wait_for

# A shell that exits at SIGTERM. The program that it starts saves, and exits at a line on its stdin.
SAVES = "(trap '' TERM; echo $$ ready; read end) & trap 'exit 0' TERM; wait"


class Worker:
    """A child process with its own process group, like a worker that is a command."""

    def __init__(self, children: Children, local_rank: int) -> None:
        self.name = (0, local_rank)
        self.process = subprocess.Popen(
            ["sh", "-c", f"exec 3<&0; {SAVES.replace('read end', 'read end <&3')}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout
        assert self.process.stdout.readline().endswith(b" ready\n")
        children.add(self.process.pid, self.name)

    def save(self) -> None:
        """Let it come to the end of its work."""
        assert self.process.stdin
        self.process.stdin.write(b"end\n")
        self.process.stdin.close()

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                with suppress(OSError):
                    pipe.close()
        # The test's `Children` has reaped it.
        self.process.returncode = 0


@pytest.fixture
def children() -> Children:
    return Children()


@pytest.fixture
def two(children: Children) -> Iterator[tuple[Worker, Worker]]:
    workers = Worker(children, 0), Worker(children, 1)
    yield workers
    for worker in workers:
        worker.close()


def reported(children: Children) -> list[int | str]:
    """The local ranks whose exits are reported now."""
    return [event["key"] for event in children.reap()]


def signal_groups_and_await_leaders(children: Children, workers: tuple[Worker, ...]) -> None:
    """Send SIGTERM to all groups. The shells end, and the programs that they started go on."""
    for worker in workers:
        children.signal({worker.name}, signal.SIGTERM, group=True)
        os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT)
    assert reported(children) == []
    assert children.waits_for_groups


def test_a_worker_that_is_killed_does_not_hurry_the_one_that_still_saves(
    children: Children, two: tuple[Worker, Worker]
) -> None:
    killed, saves = two
    signal_groups_and_await_leaders(children, two)

    children.signal({killed.name}, signal.SIGKILL, group=True)
    after_kill = wait_for(lambda: reported(children), "the killed one's end")
    assert (after_kill, reported(children)) == ([0], [])

    saves.save()
    assert wait_for(lambda: reported(children), "the end of the one that saved") == [1]


def test_a_killed_workers_group_is_not_waited_for(children: Children, two: tuple[Worker, Worker]) -> None:
    first, second = two
    children.signal({first.name}, signal.SIGTERM, group=False)
    children.signal({first.name}, signal.SIGKILL, group=False)
    os.waitid(os.P_PID, first.process.pid, os.WEXITED | os.WNOWAIT)

    assert reported(children) == [0]
    signal_groups_and_await_leaders(children, (second,))


def test_of_a_notice_those_with_a_handler_are_distinguished(children: Children, two: tuple[Worker, Worker]) -> None:
    assert children.catching({two[1].name}, signal.SIGTERM) == {two[1].name}
    assert children.catching({two[0].name}, signal.SIGUSR2) == set()


def dead(*command: str) -> int:
    """The pid of a zombie."""
    process = subprocess.Popen(command)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    # This test's `Children` reaps it.
    process.returncode = 0
    return process.pid


@pytest.mark.parametrize(("program", "code"), [("exit 3", 3), ("kill -9 $$", -9)], ids=["by itself", "killed"])
def test_an_exit_is_reported_and_reaped_with_those_of_processes_that_have_no_name(
    children: Children, program: str, code: int
) -> None:
    pid, of_a_module = dead("sh", "-c", program), dead("true")
    children.add(pid, (0, 5))

    (exited,) = children.reap()

    assert (exited["key"], exited["pid"], exited["code"]) == (5, pid, code)
    assert [state(each) for each in (pid, of_a_module)] == ["", ""]


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
