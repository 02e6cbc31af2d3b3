"""Nodes for tests: network namespaces with addresses, host names and /dev/shm of their own, and faults between them.

The namespaces have no names: each lives as long as its holder, a process that ends with the test's process. A process
on a node is in the node's cgroup, and ends with the thread that started it. So two test runs cannot meet. A killed run
can leave only cgroups and their processes. The next run finds them by the pid in their names and removes them.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.cgroups import kill_cgroup, make_cgroup, own_cgroup
from tests.harness import DEADLINE_S, RUN_LIMIT_S

PREFIX = "elaunch-nodes"
ON_NODE = Path(__file__).with_name("on_node.sh")
# The PATH of a root shell from `su` may lack these folders.
TOOLS = {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"}
_numbers = itertools.count()

# The node's own memory, its own /etc/hosts (the bind keeps the file when the folder has gone again), its own name.
HOLDER = """
echo 0 >"$1/cgroup.procs"
echo "$2" >/proc/sys/kernel/hostname
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /mnt
printf %s "$3" >/mnt/hosts
mount --bind /mnt/hosts /etc/hosts
umount /mnt
echo 1 >/proc/sys/net/ipv6/conf/all/keep_addr_on_down
echo ready
exec cat >/dev/null
"""


def missing() -> str:
    """The reason why this machine cannot have nodes, or the empty string."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [
        name for name in ("ip", "nft", "nsenter", "setpriv", "unshare") if not shutil.which(name, path=TOOLS["PATH"])
    ]
    if absent:
        return f"not installed: {', '.join(absent)} (`make tools`)"
    cgroup = make_cgroup(f"{PREFIX}-probe-{os.getpid()}")
    if not cgroup:
        return "no cgroup2 hierarchy that may be written, or a kernel before 5.14"
    cgroup.rmdir()
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True, timeout=RUN_LIMIT_S
    )
    return tried.stderr.strip()


needs_nodes = pytest.mark.skipif(bool(_why := missing()), reason=_why or "nodes can be had")


class Node:
    """One node; `prefix` before a command runs it there, on whatever namespaces the node has at that time."""

    def __init__(self, switch: Switch, folder: Path, index: int, hosts: str) -> None:
        self.index = index
        self.name = f"node{index}"
        self.ipv4, self.ipv6 = address4(index), address6(index)
        self.cgroup = folder / self.name
        self.prefix = (str(ON_NODE), str(self.cgroup))
        self._switch = switch
        self._hosts = hosts
        self._holder: subprocess.Popen[str] | None = None
        self._started: list[subprocess.Popen[str]] = []
        self.cgroup.mkdir()
        self._holders = folder / f"{self.name}.holder"
        self._holders.mkdir()

    def __repr__(self) -> str:
        return self.name

    @property
    def port(self) -> str:
        """The node's port of the switch."""
        return f"to-{self.name}"

    @property
    def is_on(self) -> bool:
        """Whether the node has power."""
        return self._holder is not None

    def popen(self, *command: str, **popen: object) -> subprocess.Popen[str]:
        """Start a command on the node; its pid is the Popen's."""
        process = subprocess.Popen([*self.prefix, *command], text=True, **popen)  # type: ignore[call-overload]
        self._started.append(process)
        return process  # type: ignore[no-any-return]

    def run(self, *command: str, code: int = 0) -> str:
        """What a command on the node prints to stdout; fails if it exits with another code."""
        done = subprocess.run([*self.prefix, *command], capture_output=True, text=True, timeout=180)
        assert done.returncode == code, f"on {self}: {command} exited with {done.returncode}: {done.stderr}"
        return done.stdout

    def processes(self) -> list[psutil.Process]:
        """All that runs on the node, whoever started it; no zombies."""
        found = []
        # Not by rglob: it raises where a group is removed meanwhile.
        for folder, _, _ in os.walk(self.cgroup):
            with suppress(OSError):
                for pid in Path(folder, "cgroup.procs").read_text().split():
                    with suppress(psutil.Error):
                        process = psutil.Process(int(pid))
                        if process.status() != psutil.STATUS_ZOMBIE:
                            found.append(process)
        return found

    def cgroups(self) -> list[Path]:
        """The cgroups that were made on the node and are still there."""
        return [folder for folder in self.cgroup.iterdir() if folder.is_dir()]

    def link_down(self) -> None:
        """Set the node's network interface down. The node's kernel notices."""
        self._ip("link set eth0 down")

    def link_up(self) -> None:
        self._ip("link set eth0 up")

    def unplug(self) -> None:
        """Take the node's cable off the switch. No kernel notices."""
        self._switch.ip(f"link set {self.port} nomaster")

    def plug_in(self) -> None:
        self._switch.ip(f"link set {self.port} master br0")

    def power_off(self) -> None:
        """End all processes of the node at once, and lose its memory. No further packet leaves it."""
        self._switch.ip(f"link del {self.port}")
        self._end()

    def power_on(self) -> None:
        """Start it again, with nothing running: `power_off` before."""
        self.cgroup.mkdir(exist_ok=True)
        self.begin()
        self.connect()

    def shared_memory(self) -> list[str]:
        """The files that elaunch has left in the node's /dev/shm."""
        if not self._holder:
            return []
        return [str(path) for path in Path(f"/proc/{self._holder.pid}/root/dev/shm").glob("elaunch*")]

    def begin(self) -> None:
        """Start making its namespaces; `connect` waits for them."""
        arguments = ("holder", str(self._holders), self.name, self._hosts)
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "sh", "-euc", HOLDER, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def connect(self) -> None:
        """Wait for its namespaces and give it a cable."""
        assert self._holder
        assert self._holder.stdout
        assert self._holder.stdout.readline() == "ready\n", "the node's namespaces could not be made"
        # A node that is started again keeps its hardware address, as a machine does: other nodes remember the address.
        peer = f"peer name eth0 address 02:00:00:00:00:{self.index + 1:02x} netns {self._holder.pid}"
        self._switch.ip(f"link add {self.port} type veth {peer}", f"link set {self.port} master br0 up")
        self._ip(
            "link set lo up",
            f"addr add {self.ipv4}/24 dev eth0",
            f"addr add {self.ipv6}/64 dev eth0 nodad",
            "link set eth0 up",
        )

    def close(self) -> None:
        """End all that runs on it."""
        self._end()
        self._holders.rmdir()

    def _end(self) -> None:
        kill_cgroup(self.cgroup)
        for process in self._started:
            process.wait(DEADLINE_S)
        if self._holder:
            self._holder.communicate(timeout=DEADLINE_S)
            self._holder = None

    def _ip(self, *lines: str) -> None:
        assert self._holder
        _ip(self._holder.pid, lines)


class Switch:
    """The bridge that the nodes are connected to, in a namespace of its own without an address."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo ready; exec cat >/dev/null"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        assert self._holder.stdout
        assert self._holder.stdout.readline() == "ready\n"
        # With snooping, the bridge may drop multicast (neighbour discovery) for groups that it has not seen joined.
        self.ip("link add br0 type bridge mcast_snooping 0", "link set br0 up")

    def ip(self, *lines: str) -> None:
        """Run lines of `ip` here."""
        _ip(self._holder.pid, lines)

    def filter(self, rules: Sequence[str]) -> None:
        """Replace the nftables rules for forwarded packets by these."""
        table = "table bridge faults"
        chain = ["type filter hook forward priority 0", *rules]
        lines = [table, f"delete {table}", f"{table} {{", "chain passed_on {", *chain, "}", "}", ""]
        _in_network(self._holder.pid, ["nft", "-f", "-"], "\n".join(lines))

    def close(self) -> None:
        self._holder.communicate(timeout=DEADLINE_S)


class Nodes:
    """`count` nodes on one switch: node0 … with 10.77.0.1 …, fd77::1 …; use it as a context manager.

    All know each other's names. With `own_name_is_loopback` a node resolves its own name to 127.0.1.1, as on a Debian
    installation.
    """

    def __init__(self, count: int, *, own_name_is_loopback: bool = False) -> None:
        remove_leftovers()
        own = psutil.Process()
        cgroup = make_cgroup(f"{PREFIX}-{own.pid}-{_born(own)}-{next(_numbers)}")
        assert cgroup, "no cgroup2 hierarchy"
        self._cgroup = cgroup
        self._nodes: list[Node] = []
        self._rules: list[str] = []
        self._switch: Switch | None = None
        try:
            self._start(count, own_name_is_loopback)
        except BaseException:
            self.close()
            raise

    def _start(self, count: int, own_name_is_loopback: bool) -> None:
        self._switch = switch = Switch()
        for i in range(count):
            self._nodes.append(Node(switch, self._cgroup, i, hosts(count, i if own_name_is_loopback else None)))
        for each in self._nodes:
            each.begin()
        for each in self._nodes:
            each.connect()

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, index: int) -> Node:
        return self._nodes[index]

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    def lose(self, percent: int) -> None:
        """From now on lose this percentage of packets."""
        self._add(f"numgen random mod 100 < {percent} drop")

    def cut(self, one: Node, other: Node) -> None:
        """From now on no packet passes between these two nodes. Both still reach the others."""
        self._add(*(f'iifname "{a.port}" oifname "{b.port}" drop' for a, b in ((one, other), (other, one))))

    def refuse(self, *rules: str) -> None:
        """From now on drop packets that these nftables rules match."""
        self._add(*(f"{rule} drop" for rule in rules))

    def heal(self) -> None:
        """End the effects of `lose`, `cut` and `refuse`."""
        self._rules.clear()
        self._add()

    def _add(self, *rules: str) -> None:
        assert self._switch
        self._rules += rules
        self._switch.filter(self._rules)

    def processes(self) -> list[psutil.Process]:
        """All that runs on any of them."""
        return [process for node in self for process in node.processes()]

    def close(self) -> None:
        """End all that runs on the nodes, and the nodes."""
        for node in self._nodes:
            node.close()
        if self._switch:
            self._switch.close()
        kill_cgroup(self._cgroup)


def address4(index: int) -> str:
    return f"10.77.0.{index + 1}"


def address6(index: int) -> str:
    return f"fd77::{index + 1:x}"


def hosts(count: int, loopback: int | None = None) -> str:
    """What /etc/hosts says; the name of node `loopback` means that node itself only."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
    for i in range(count):
        addresses = ["127.0.1.1"] if i == loopback else [address4(i), address6(i)]
        lines += [f"{address} node{i}" for address in addresses]
    return "".join(line + "\n" for line in lines)


def remove_leftovers() -> None:
    """End all processes that killed test runs have left on their nodes."""
    own = own_cgroup()
    for folder in own.glob(f"{PREFIX}-*") if own else ():
        pid, born = folder.name.removeprefix(f"{PREFIX}-").split("-")[:2]
        with suppress(psutil.NoSuchProcess):
            if born == _born(psutil.Process(int(pid))):
                continue
        kill_cgroup(folder)


def _born(process: psutil.Process) -> str:
    """The start time of the process in kernel ticks. Together with the pid it identifies the process for ever."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]


def _ip(pid: int, lines: Sequence[str]) -> None:
    _in_network(pid, ["ip", "-batch", "-"], "".join(line + "\n" for line in lines))


def _in_network(pid: int, command: Sequence[str], text: str) -> str:
    done = subprocess.run(
        ["nsenter", "--target", str(pid), "--net", *command],
        input=text,
        capture_output=True,
        text=True,
        timeout=180,
        env=TOOLS,
    )
    assert done.returncode == 0, f"{command} failed: {done.stderr}\n{text}"
    return done.stdout
