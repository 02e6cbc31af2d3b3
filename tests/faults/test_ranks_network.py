"""The ranks' own connections on nodes: a host that is lost, a link that drops packets, and a node's own address."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.harness import environment, script
from tests.nodes import Node, Nodes, needs_nodes

pytestmark = needs_nodes

# Two ranks, whose store is a folder.
RANK = """
import os, pathlib, sys, time
import torch
from elaunch.trainer.ranks.connections import Connections, PeerLost
from elaunch.trainer.ranks.meeting import own_address
from elaunch.trainer.ranks.peers import Peers

class Folder:
    own_address = staticmethod(lambda: own_address(os.environ))
    def publish(self, rank, content):
        pathlib.Path(f".{rank}").write_bytes(content)
        pathlib.Path(f".{rank}").rename(f"contact-{rank}")
    def find(self, rank):
        path = pathlib.Path(f"contact-{rank}")
        return path.read_bytes() if path.exists() else None

rank, region = int(sys.argv[1]), torch.zeros(int(sys.argv[2]), dtype=torch.uint8)
peers = Peers()
peers.rank, peers.world_size = rank, 2
peers._open = lambda: Connections("test", rank, 2, Folder(), timeout_s=60)
peers.largest([rank])
print("ready", flush=True)
sys.stdin.readline()
began_s = time.monotonic()
try:
    if rank:
        peers.receive(region[:peers.length_from(0)], 0)
    else:
        peers.send(region.fill_(7), 1)
    peers.largest([rank])
    print("same" if region[-1:] == 7 else "other")
except PeerLost as error:
    print(f"{time.monotonic() - began_s:.1f} s: {error}")
"""


def started(nodes: Nodes, folder: Path, size: int) -> list[subprocess.Popen[str]]:
    """A rank on each of two nodes; they have met."""
    program = str(script(folder, RANK))
    env = environment({"GLOO_SOCKET_IFNAME": "eth0"})
    ends = {"cwd": folder, "env": env, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    found = [node.popen(sys.executable, program, *map(str, (rank, size)), **ends) for rank, node in enumerate(nodes)]
    for each in found:
        assert each.stdout
        assert each.stdout.readline() == "ready\n"
    return found


def test_a_link_that_drops_packets_is_no_lost_host(tmp_path: Path) -> None:
    with Nodes(2) as nodes:
        # A packet may be lost several times in a row.
        ranks = started(nodes, tmp_path, 16 << 20)
        nodes.lose(10)

        for each in ranks:
            assert each.stdin
            each.stdin.write("go\n")
            each.stdin.flush()

        assert [each.communicate(timeout=180)[0] for each in ranks] == ["same\n"] * 2
        assert nodes.lost() > 10


ASKS = """
import json, sys
from elaunch.trainer.ranks.meeting import own_address
for environ in json.loads(sys.argv[1]):
    print(own_address(environ))
"""


def own_addresses(node: Node, folder: Path, *environs: dict[str, str]) -> list[str]:
    """The addresses that ranks on this node with these environments would tell the others."""
    return node.run(sys.executable, str(script(folder, ASKS)), json.dumps(environs)).splitlines()


def test_a_rank_on_the_first_node_tells_an_address_that_the_others_reach(tmp_path: Path) -> None:
    several = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    # Nobody says whether there are other nodes: without a launcher, and without MASTER_ADDR.
    unknown: list[dict[str, str]] = [{"MASTER_ADDR": "node0", "WORLD_SIZE": "4"}, {}]
    on_this_host = [{**several, "LOCAL_WORLD_SIZE": "4"}, {**several, "MASTER_ADDR": "127.0.0.1"}]
    with Nodes(2, own_name_is_loopback=True) as nodes:
        first, second = nodes
        (of_second,) = own_addresses(second, tmp_path, several)
        assert of_second in (second.ipv4, second.ipv6)
        found = own_addresses(first, tmp_path, several, *unknown, *on_this_host)
        assert found == [first.ipv4] * 3 + ["127.0.0.1"] * 2

        first.run("ip", "link", "add", "other0", "type", "veth", "peer", "name", "other1")
        first.run("ip", "addr", "add", "192.168.7.1/24", "dev", "other0")
        (of_several,) = own_addresses(first, tmp_path, several)
        assert of_several in (first.ipv4, "192.168.7.1")

        first.run("ip", "route", "add", "default", "dev", "eth0")
        assert own_addresses(first, tmp_path, several) == [first.ipv4]


def test_a_host_without_any_network_has_its_loopback_address(tmp_path: Path) -> None:
    with Nodes(1, own_name_is_loopback=True) as nodes:
        nodes[0].link_down()
        nodes[0].run("ip", "addr", "flush", "dev", "eth0")

        assert own_addresses(nodes[0], tmp_path, {"MASTER_ADDR": "node0", "WORLD_SIZE": "2"}) == ["127.0.0.1"]
