"""stores: what is checked before a store is served."""

from __future__ import annotations

import pytest

from elaunch.launcher.errors import UsageError
from elaunch.launcher.options import HelpRequested, parse
from elaunch.launcher.plan import plan
from elaunch.launcher.stores import Reached, reach
from tests.etcd import free_ports

# Documentation's own: no host has it.
ANOTHERS = "192.0.2.1"


def reached(*argv: str) -> Reached:
    options = parse([*argv, "t.py"], {})
    assert not isinstance(options, HelpRequested)
    return reach(options, plan(options, {}, str), lambda line: None)


@pytest.mark.parametrize(("nodes", "ranks"), [("2", "1"), ("3", "1 or 2"), ("4:8", "1 to 7")])
@pytest.mark.parametrize("rank", [(), ("--node-rank", "0")])
def test_node_rank_0_on_a_host_that_is_not_the_masters_is_a_sentence(
    nodes: str, ranks: str, rank: tuple[str, ...]
) -> None:
    sentence = f"{ANOTHERS} is no address of this one; on this node use --node-rank {ranks}, or"

    with pytest.raises(UsageError, match=sentence):
        reached("--nnodes", nodes, "--master-addr", ANOTHERS, *rank)


def test_the_masters_host_serves_as_node_rank_0() -> None:
    assert is_served_by("--master-addr", "127.0.0.1", "--node-rank", "0")


def test_another_rank_may_have_its_master_elsewhere() -> None:
    assert not is_served_by("--master-addr", ANOTHERS, "--node-rank", "1")


def test_who_says_that_this_is_the_host_is_believed() -> None:
    assert is_served_by("--master-addr", ANOTHERS, "--node-rank", "0", "--rdzv-conf", "is_host=1")


def is_served_by(*argv: str) -> bool:
    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    found = reached("--nnodes", "2", "--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1", *argv)
    if found.served:
        found.served.stop()
    return found.served is not None
