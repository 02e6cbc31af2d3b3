"""A watch whose server's host has lost its power, so that the connection stays half open."""

from __future__ import annotations

import select
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd import TRANSPORTS, Etcd
from tests.harness import DEADLINE_S
from tests.nodes import Nodes, needs_nodes

pytestmark = needs_nodes

WATCHING = """
import sys
from elaunch.rendezvous.endpoint import Endpoint
from tests.etcd import client

store = client([Endpoint("node0", 2379)], sys.argv[1], deadline_s=60)
store.watch("/elaunch/", store.read("/elaunch/").revision, lambda update: print(*update.entries, flush=True))
print("watching", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with Nodes(2) as nodes:
        yield nodes


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_idle_watch_notices_that_its_servers_host_was_switched_off(
    nodes: Nodes, tmp_path: Path, transport: str
) -> None:
    host, client = nodes
    with Etcd(hosts=[host.ipv4], ports=[2379, 2380], prefix=lambda _: host.prefix, folder=tmp_path) as etcd:
        watching = client.popen(sys.executable, "-u", "-c", WATCHING, transport, stdin=-1, stdout=-1)
        assert watching.stdout
        assert watching.stdout.readline() == "watching\n"
        etcd.ctl("put", "/elaunch/before", "")
        assert watching.stdout.readline() == "/elaunch/before\n"

        # No packet ends the connection, and its other end does not exist any more.
        host.power_off()
        etcd.members[0].kill()
        host.power_on()
        etcd.members[0].start()
        etcd.members[0].wait_ready()
        etcd.ctl("put", "/elaunch/after", "")

        told, _, _ = select.select([watching.stdout], [], [], DEADLINE_S)
        assert told, "the watch waits for ever"
        assert watching.stdout.readline() == "/elaunch/after\n"
