"""launcher.store.connect: what is checked before a store is served."""

from __future__ import annotations

import socket
from contextlib import nullcontext
from pathlib import Path

import pytest

from elaunch.launcher.cluster.cluster import Cluster
from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.network import reach as addressing
from elaunch.launcher.network.reach import NoAddress
from elaunch.launcher.options.options import Options, parse
from elaunch.launcher.store import connect
from elaunch.launcher.store.connect import Reached, reach
from elaunch.launcher.store.plan import plan
from elaunch.launcher.store.rendezvous_plan import Planned
from tests.harness import free_ports

# Documentation's own: no host has it.
ANOTHERS = "192.0.2.1"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))


def reached(*argv: str) -> Reached:
    options = parse([*argv, "t.py"], {})
    return reach(options, plan(options, {}, str), lambda line: None)


@pytest.mark.parametrize(("nodes", "ranks"), [("2", "1"), ("3", "1 or 2"), ("4:8", "1 to 7")])
@pytest.mark.parametrize("rank", [(), ("--node-rank", "0")])
def test_node_rank_0_on_a_host_that_is_not_the_masters_is_a_sentence(
    nodes: str, ranks: str, rank: tuple[str, ...]
) -> None:
    sentence = f"{ANOTHERS} is no address of this host; on this node use --node-rank {ranks}, or"

    with pytest.raises(UsageError, match=sentence):
        reached("--nnodes", nodes, "--master-addr", ANOTHERS, *rank)


def test_the_masters_host_serves_as_node_rank_0() -> None:
    assert is_served_by("--master-addr", "127.0.0.1", "--node-rank", "0")


def test_another_rank_may_have_its_master_elsewhere() -> None:
    assert not is_served_by("--master-addr", ANOTHERS, "--node-rank", "1")


def test_who_says_that_this_is_the_host_is_believed() -> None:
    assert is_served_by("--master-addr", ANOTHERS, "--node-rank", "0", "--rdzv-conf", "is_host=1")


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        *(
            (f"--rdzv-endpoint {host}:5", "--rdzv-endpoint 10.9.8.7:5")
            for host in ("127.0.0.1", "localhost", "0.0.0.0")
        ),
        ("--rdzv-endpoint [::1]:5", "--rdzv-endpoint 10.9.8.7:5"),
        ("--master-addr localhost --node-rank 1", "--master-addr 10.9.8.7"),
        (f"--rdzv-endpoint {ANOTHERS}:5", ""),
        (f"--rdzv-endpoint {socket.gethostname()}:5", ""),
        ("--rdzv-endpoint localhost:5,localhost:6", ""),
    ],
)
def test_an_endpoint_that_no_other_host_can_reach_is_known_with_what_to_give_instead(
    words: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addressing, "routable_addresses", lambda: ["10.9.8.7"])
    options = parse(["--nnodes", "2", *words.split(), "t.py"], {})

    said = connect.only_here(plan(options, {}, str).plan)

    assert said.endswith(f"give all nodes {instead}") if instead else not said
    assert ("address of this host alone, and no other host can reach it" in said) == bool(instead)


@pytest.mark.parametrize(("scheduler", "is_of_pods"), [("Open MPI", False), ("Kubernetes Job", True)])
def test_a_head_that_is_not_where_node_0_is_is_a_sentence(scheduler: str, is_of_pods: bool) -> None:
    port = free_ports(1)[0]
    cluster = Cluster(scheduler, (2, 2), 0, head=ANOTHERS, head_port=port, run_id="mpi-1", is_of_pods=is_of_pods)
    options, planned = at_its_head(cluster)

    refusal = pytest.raises(UsageError, match=f"is {ANOTHERS}, which .*-x MASTER_ADDR=")
    with nullcontext() if is_of_pods else refusal:
        reach(options, planned, print).close()


def test_what_has_the_port_of_a_schedulers_head_is_not_spoken_to() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        options, planned = at_its_head(Cluster("Slurm", (2, 2), 0, "127.0.0.1", port, run_id="test-1.0"))

        with pytest.raises(SiteError, match=f"another program has port {port}, "):
            reach(options, planned, print)

        other.settimeout(0)
        with pytest.raises(BlockingIOError):
            other.accept()


def test_a_schedulers_node_reaches_the_store_that_its_head_serves() -> None:
    port = free_ports(1)[0]
    head, other = (Cluster("Slurm", (2, 2), i, "127.0.0.1", port, run_id="test-1.0") for i in range(2))

    served = reach(*at_its_head(head), print)
    joined = reach(*at_its_head(other), print)

    assert joined.store.check() == served.store.check()
    joined.close()
    served.close()


@pytest.mark.parametrize("scheduler", ["Slurm", ""])
def test_under_a_scheduler_the_heads_name_may_take_as_long_as_a_node(
    monkeypatch: pytest.MonkeyPatch, scheduler: str
) -> None:
    monkeypatch.setattr(connect, "_ADDRESS_WAIT_S", 0.0)
    monkeypatch.setattr(connect, "_ADDRESS_PAUSE_S", 0.01)
    options = parse(["--nnodes", "2", "--rdzv-endpoint", "nobody.invalid", "t.py"], {})
    answers = [NoAddress("not yet"), NoAddress("not yet"), "192.0.2.7"]

    def own_address(*_: object) -> str:
        answer = answers.pop(0)
        if isinstance(answer, str):
            return answer
        raise answer

    monkeypatch.setattr(addressing, "own_address", own_address)
    planned = plan(options, {}, str, Cluster(scheduler) if scheduler else None)

    if scheduler:
        assert connect._own_address(planned, print) == "192.0.2.7"
    else:
        with pytest.raises(SiteError, match="is --rdzv-endpoint right"):
            connect._own_address(planned, print)


def at_its_head(cluster: Cluster) -> tuple[Options, Planned]:
    options = parse(["--nnodes", "2", "--local-addr", "127.0.0.1", "t.py"], {})
    return options, plan(options, {"ELAUNCH_TOKEN": "told to all pods"} if cluster.is_of_pods else {}, str, cluster)


def is_served_by(*argv: str) -> bool:
    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    found = reached("--nnodes", "2", "--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1", *argv)
    if found.served:
        found.served.stop()
    return found.served is not None
