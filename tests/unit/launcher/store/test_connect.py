"""launcher.store.connect: what is checked before a store is served."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.options.options import Options, parse
from elaunch.launcher.schedulers.facts import Cluster
from elaunch.launcher.store import connect
from elaunch.launcher.store.connect import argv_for_others, connect_store, invite
from elaunch.launcher.store.locate import Planned, RendezvousPlan, plan
from tests.harness import free_ports

# Documentation's own: no host has it.
ANOTHERS = "192.0.2.1"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize(("nodes", "ranks"), [("2", "1"), ("4:8", "1 to 7")])
def test_node_rank_0_on_a_host_that_is_not_the_masters_is_a_sentence(nodes: str, ranks: str) -> None:
    sentence = f"{ANOTHERS} is not an address of this host; on this node use --node-rank {ranks}, or"

    options = parse(["--nnodes", nodes, "--master-addr", ANOTHERS, "t.py"], {})

    with pytest.raises(UsageError, match=sentence), connect_store(options, plan(options, {}, str), print):
        pass


@pytest.mark.parametrize(
    ("argv", "instead"),
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
    argv: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "routable_addresses", lambda: ["10.9.8.7"])
    options = parse(["--nnodes", "2", *argv.split(), "t.py"], {})

    reason = connect.only_here(plan(options, {}, str).plan)

    assert reason.endswith(f"give all nodes {instead}") if instead else not reason
    assert ("address of this host alone, and no other host can reach it" in reason) == bool(instead)


def test_what_has_the_port_of_a_schedulers_head_is_not_spoken_to() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        options, planned = at_its_head(Cluster("Slurm", (2, 2), 0, "127.0.0.1", port, run_id="test-1.0"))

        with (
            pytest.raises(SiteError, match=f"another program has port {port}, "),
            connect_store(options, planned, print),
        ):
            pass

        other.settimeout(0)
        with pytest.raises(BlockingIOError):
            other.accept()


def test_a_schedulers_node_reaches_the_store_that_its_head_serves() -> None:
    port = free_ports(1)[0]
    head, other = (Cluster("Slurm", (2, 2), i, "127.0.0.1", port, run_id="test-1.0") for i in range(2))

    with connect_store(*at_its_head(head), print) as served, connect_store(*at_its_head(other), print) as joined:
        assert joined.store.check() == served.store.check()


def at_its_head(cluster: Cluster) -> tuple[Options, Planned]:
    options = parse(["--nnodes", "2", "--local-addr", "127.0.0.1", "t.py"], {})
    return options, plan(options, {"ELAUNCH_TOKEN": "given to all pods"} if cluster.is_of_pods else {}, str, cluster)


FILE = "/home/me/.elaunch/stores/0123456789abcdef0123456789abcdef"


def served(token_file: str = FILE) -> Any:
    """A store's process that has made a token."""
    return SimpleNamespace(token="made-token", token_file=token_file, problem="Read-only file system")


def parsed(*argv: str, **environ: str) -> tuple[Options, RendezvousPlan]:
    options = parse(argv, environ)
    return options, plan(options, environ, lambda path: "secret of a file").plan


VARIABLES = {
    "PET_NNODES": "2",
    "PET_RDZV_ENDPOINT": "a:5",
    "PET_RDZV_BACKEND": "c10d",
    "PET_NPROC_PER_NODE": "4",
    "PET_MODULE": "1",
    "PET_NO_PRELOAD": "0",
    "PET_RDZV_CONF": "is_host=1,timeout=99",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",
}


@pytest.mark.parametrize(
    ("typed", "environ", "line"),
    [
        ("--nnodes 2 --rdzv-endpoint host0:2379 train.py --lr 1", {}, None),
        (
            "--nnodes 2:3 --rdzv-endpoint a --local-addr 10.0.0.1 --rdzv-conf is_host=1,lease_ttl=5 -- -odd.py",
            {},
            "--nnodes 2:3 --rdzv-endpoint a --rdzv-conf lease_ttl=5 -- -odd.py",
        ),
        (
            "--nnodes 2 --node-rank 0 --master-addr host0 --master-port 5 t.py",
            {},
            "--nnodes 2 --master-addr host0 --master-port 5 --node-rank 1 t.py",
        ),
        (
            "pkg",
            VARIABLES,
            "--nnodes 2 --rdzv-endpoint a:5 --nproc-per-node 4 --stop-grace 5 --module --rdzv-backend c10d"
            " --rdzv-conf timeout=99 pkg",
        ),
    ],
)
def test_the_line_for_others_has_the_variables_and_nothing_that_is_this_nodes_own(
    typed: str, environ: dict[str, str], line: str | None
) -> None:
    assert shlex.join(argv_for_others(*parsed(*shlex.split(typed), **environ))) == (line or typed)


def test_a_token_that_was_made_is_shown_and_one_that_was_given_is_not() -> None:
    typed = ("--nnodes", "2", "--rdzv-endpoint", "host0:5", "t.py")

    (made,) = invite(*parsed(*typed), served(), is_terminal=True)
    (given,) = invite(*parsed(*typed, ELAUNCH_TOKEN="given-token"), served(), is_terminal=False)

    assert made == "on the other node type: ELAUNCH_TOKEN=made-token elaunch --nnodes 2 --rdzv-endpoint host0:5 t.py"
    assert given == "on the other node type with the same token: elaunch --nnodes 2 --rdzv-endpoint host0:5 t.py"


def test_a_log_gets_the_name_of_the_tokens_file_and_not_the_token() -> None:
    typed = ("--nnodes", "2", "--rdzv-endpoint", "host0:5", "t.py")

    line, hint = invite(*parsed(*typed), served(), is_terminal=False)

    assert line == f"on the other node type: elaunch --token-file {FILE} --nnodes 2 --rdzv-endpoint host0:5 t.py"
    assert hint.startswith(f"the store's token is in {FILE}, which only you can read: nodes that share this home find")
    assert hint.endswith(f"copy it first (scp host0:{FILE} token), and type --token-file token")
    assert "made-token" not in line + hint
