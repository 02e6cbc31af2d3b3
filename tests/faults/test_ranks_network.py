"""The ranks' own connections on nodes: a host that is lost, a link that drops packets, and a node's own address."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.harness import script
from tests.nodes import Node, Nodes, needs_nodes

pytestmark = needs_nodes


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
