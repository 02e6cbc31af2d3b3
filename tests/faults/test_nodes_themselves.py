"""The nodes on which the fault tests run: they do what they promise, and leave nothing."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.faults.processes import is_alive
from tests.harness import wait_for
from tests.nodes import Node, Nodes, needs_nodes

pytestmark = needs_nodes

PYTHON = (sys.executable, "-I", "-S", "-u", "-c")

CONNECTS = """
import socket, sys, time
end_s = time.monotonic() + float(sys.argv[1])
for where in sys.argv[2:]:
    said = "no time"
    while (left_s := end_s - time.monotonic()) > 0:
        try:
            socket.create_connection((where, 4711), timeout=left_s).close()
            said = "reached"
            break
        except OSError as error:
            # A neighbour that was looked for in vain a moment ago is unreachable at once.
            said = error
            time.sleep(0.02)
    print(said)
"""

LISTENS = """
import signal, socket
listener = socket.socket(socket.AF_INET6)
listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
listener.bind(("::", 4711))
listener.listen(100)
print("ready")
while True:
    signal.pause()
"""


def started(node: Node, program: str, *args: str) -> subprocess.Popen[str]:
    """A Python program on the node, once it has said that it is ready."""
    process = node.popen(*PYTHON, program, *args, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


def reaches(node: Node, *where: str) -> bool:
    """Whether a connection to each succeeds. The deadline is long: success is expected."""
    return node.run(*PYTHON, CONNECTS, "60", *where) == "reached\n" * len(where)


def is_cut_off(node: Node, where: str) -> bool:
    """Whether no connection succeeds within a time that is otherwise enough."""
    return node.run(*PYTHON, CONNECTS, "0.3", where) != "reached\n"


@pytest.mark.parametrize(("off", "on"), [("link_down", "link_up"), ("unplug", "plug_in")])
def test_a_link_that_is_off_lets_nothing_pass_until_it_is_on_again(off: str, on: str) -> None:
    with Nodes(3) as nodes:
        for node in nodes:
            started(node, LISTENS)
        assert reaches(nodes[0], "node1")

        getattr(nodes[1], off)()

        assert is_cut_off(nodes[0], nodes[1].ipv4)
        assert is_cut_off(nodes[1], nodes[0].ipv6)
        assert reaches(nodes[0], "node2")
        getattr(nodes[1], on)()
        assert reaches(nodes[0], nodes[1].ipv4, nodes[1].ipv6)
        assert reaches(nodes[1], nodes[0].ipv4, nodes[0].ipv6)


def test_a_cut_parts_two_nodes_only() -> None:
    with Nodes(3) as nodes:
        for node in nodes:
            started(node, LISTENS)

        nodes.cut(nodes[0], nodes[1])

        assert is_cut_off(nodes[0], "node1")
        assert is_cut_off(nodes[1], "node0")
        assert reaches(nodes[0], "node2")
        assert reaches(nodes[2], "node1")
        nodes.heal()
        assert reaches(nodes[0], "node1")


def test_nothing_stays_of_nodes_even_after_an_exception() -> None:
    network = _network(psutil.Process())
    processes: list[psutil.Process] = []
    with suppress(ZeroDivisionError), Nodes(2) as nodes:
        nodes[0].popen("sh", "-c", "setsid sleep 600 & sleep 600")
        wait_for(lambda: len(nodes[0].processes()) == 3, "the sleeps")
        nodes[1].power_off()
        processes = nodes.processes()
        cgroup = nodes[0].cgroup.parent
        raise ZeroDivisionError

    assert len(processes) == 3
    assert not any(is_alive(process) for process in processes)
    assert not [p for p in psutil.Process().children() if _network(p) not in (0, network)]
    assert not cgroup.exists()


def _network(process: psutil.Process) -> int:
    try:
        return Path(f"/proc/{process.pid}/ns/net").stat().st_ino
    except OSError:
        return 0
