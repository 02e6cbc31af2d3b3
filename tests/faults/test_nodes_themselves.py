"""The nodes on which the fault tests run: they do what they promise, and leave nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.faults.processes import is_alive
from tests.harness import DEADLINE_S, REPOSITORY, wait_for
from tests.nodes import Node, Nodes, needs_nodes, remove_leftovers

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

# A program that says how many datagrams have come before the end was said.
COUNTS = """
import socket
receiver = socket.socket(type=socket.SOCK_DGRAM)
receiver.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # SO_RCVBUFFORCE
receiver.bind(("", 4711))
print("ready")
count = 0
while receiver.recv(100) != b"end":
    count += 1
print(count)
"""

# The end is said often, since packets may be lost. A busy kernel passes packets on later, those of each core in their
# order.
SENDS = """
import os, socket, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
sender = socket.socket(type=socket.SOCK_DGRAM)
for _ in range(1000):
    sender.sendto(b"packet", (sys.argv[1], 4711))
for _ in range(30):
    time.sleep(0.003)
    sender.sendto(b"end", (sys.argv[1], 4711))
"""

# One end of a connection without data. It prints, when it is asked, how the other end's death looks.
HEARS = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 4711), timeout=60)
print("ready")
sys.stdin.readline()
connection.settimeout(float(sys.argv[2]))
try:
    print("closed" if not connection.recv(1) else "data")
except TimeoutError:
    print("silence")
except OSError as error:
    print("reset")
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


def arrived(sender: Node, receiver: Node) -> int:
    """How many of 1000 packets from one node to another arrive. Both nodes already know the hardware addresses."""
    counting = started(receiver, COUNTS)
    sender.run(*PYTHON, SENDS, receiver.ipv4)
    return int(counting.communicate(timeout=DEADLINE_S)[0])


def test_nodes_have_names_and_addresses_of_both_families_and_reach_each_other() -> None:
    with Nodes(3) as nodes:
        for node in nodes:
            started(node, LISTENS)

        assert [node.run("hostname") for node in nodes] == ["node0\n", "node1\n", "node2\n"]
        everywhere = [where for node in nodes for where in (node.name, node.ipv4, node.ipv6)]
        assert [node.name for node in nodes if not reaches(node, *everywhere)] == []


def test_a_command_runs_in_the_same_folder_with_the_same_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with Nodes(1) as nodes:
        process = nodes[0].popen("sh", "-c", "pwd; cat file", stdout=subprocess.PIPE, cwd=tmp_path)

        assert process.communicate(timeout=DEADLINE_S)[0] == f"{tmp_path}\ntext"


def test_the_pid_of_a_command_is_its_own() -> None:
    with Nodes(1) as nodes:
        process = nodes[0].popen(*PYTHON, "import os; print(os.getpid())", stdout=subprocess.PIPE)

        assert int(process.communicate(timeout=DEADLINE_S)[0]) == process.pid


def test_a_node_has_shared_memory_of_its_own() -> None:
    name = f"of-a-test-{os.getpid()}"
    with Nodes(2) as nodes:
        nodes[0].run("touch", f"/dev/shm/{name}")

        assert nodes[0].run("ls", "/dev/shm") == f"{name}\n"
        assert nodes[1].run("ls", "/dev/shm") == ""
        assert not Path("/dev/shm", name).exists()


def test_the_own_name_can_be_a_loopback_address_to_the_node_itself() -> None:
    with Nodes(2, own_name_is_loopback=True) as nodes:
        assert nodes[0].run("getent", "ahostsv4", "node0").split()[0] == "127.0.1.1"
        assert nodes[1].run("getent", "ahostsv4", "node0").split()[0] == nodes[0].ipv4


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


def test_packets_are_lost_in_the_share_that_was_asked_for() -> None:
    with Nodes(3) as nodes:
        assert arrived(nodes[0], nodes[1]) == arrived(nodes[0], nodes[2]) == arrived(nodes[1], nodes[0]) == 1000

        nodes.lose(30, nodes[1])

        # Seven standard deviations on each side.
        assert 600 < arrived(nodes[0], nodes[1]) < 800
        assert 600 < arrived(nodes[1], nodes[0]) < 800
        assert arrived(nodes[0], nodes[2]) == 1000
        nodes.heal()
        assert arrived(nodes[0], nodes[1]) == 1000
        nodes.lose(30)
        assert 600 < arrived(nodes[0], nodes[2]) < 800


def test_a_node_that_lost_its_power_is_silent_where_a_killed_process_is_heard() -> None:
    with Nodes(3) as nodes:
        victim, other = (started(node, LISTENS) for node in (nodes[1], nodes[2]))
        of_victim = started(nodes[0], HEARS, "node1", "0.5")
        of_other = started(nodes[0], HEARS, "node2", "60")

        nodes[1].power_off()
        other.kill()

        assert of_victim.communicate("now\n", timeout=DEADLINE_S)[0] == "silence\n"
        assert of_other.communicate("now\n", timeout=DEADLINE_S)[0] in ("closed\n", "reset\n")
        assert victim.wait() == -signal.SIGKILL


def test_power_takes_everything_on_the_node_and_brings_back_an_empty_one() -> None:
    with Nodes(2) as nodes:
        nodes[0].run("touch", "/dev/shm/snapshot")
        escaped = nodes[0].popen("sh", "-c", "setsid sleep 600 & sleep 600")
        wait_for(lambda: len(nodes[0].processes()) == 3, "the sleeps")
        had = nodes[0].processes()

        nodes[0].power_off()

        assert not [process for process in had if is_alive(process)]
        assert escaped.wait() == -signal.SIGKILL
        nodes[0].power_on()
        assert nodes[0].run("hostname") == "node0\n"
        assert nodes[0].run("ls", "/dev/shm") == ""
        started(nodes[0], LISTENS)
        assert reaches(nodes[1], "node0")


@pytest.mark.slow
def test_two_runs_at_once_do_not_meet() -> None:
    with Nodes(2) as ours, Nodes(2) as theirs:
        started(theirs[1], LISTENS)
        assert reaches(theirs[0], "node1")

        refused = ours[0].run(*PYTHON, CONNECTS, "5", ours[1].ipv4)

        # The answer comes from node 1 of the same Nodes, on which nothing listens.
        assert "refused" in refused
        assert len(theirs[1].processes()) == 1
        assert not ours[1].processes()


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


# Its prefix is its own: another test of the same run would remove what it has left.
KILLED = """
import os, subprocess, sys
import tests.nodes
tests.nodes.PREFIX = sys.argv[1]
nodes = tests.nodes.Nodes(2)
nodes[0].popen("sh", "-c", "setsid sleep 600 & wait")
while len(nodes[0].processes()) < 2:
    pass
print(nodes[0].cgroup.parent, *(process.pid for process in nodes[0].processes()), flush=True)
os.read(0, 1)
"""


def test_what_a_killed_run_has_left_goes_with_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = f"elaunch-killed-nodes-{os.getpid()}"
    monkeypatch.setattr("tests.nodes.PREFIX", prefix)
    command = [sys.executable, "-c", KILLED, prefix]
    killed = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert killed.stdout
    cgroup, *pids = killed.stdout.readline().split()
    holders = [psutil.Process(int(pid)) for pid in Path(cgroup, "node1.holder", "cgroup.procs").read_text().split()]
    remove_leftovers()
    assert len(holders) == 1
    assert all(is_alive(int(pid)) for pid in pids), "a living run's nodes are not leftovers"

    killed.kill()
    killed.wait(DEADLINE_S)

    wait_for(lambda: not is_alive(holders[0]), "the namespaces' end")
    assert any(is_alive(int(pid)) for pid in pids), "nothing is left; the test proves nothing"
    with Nodes(1):
        assert not any(is_alive(int(pid)) for pid in pids)
        assert not Path(cgroup).exists()


def _network(process: psutil.Process) -> int:
    try:
        return Path(f"/proc/{process.pid}/ns/net").stat().st_ino
    except OSError:
        return 0
