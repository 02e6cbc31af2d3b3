"""launcher.store.join_command: the line to type on the other hosts."""

from __future__ import annotations

import shlex

import pytest

from elaunch.launcher.errors import UsageError
from elaunch.launcher.options.options import Options, parse
from elaunch.launcher.store.join_command import NewToken, invitation, line_for_others
from elaunch.launcher.store.plan import plan
from elaunch.launcher.store.rendezvous_plan import RendezvousPlan

KEPT = "/home/me/.elaunch/stores/0123456789abcdef0123456789abcdef"
TERMINAL = NewToken("made-token", KEPT, "", is_terminal=True)
LOG = NewToken("made-token", KEPT, "", is_terminal=False)


def asked(*argv: str, **environ: str) -> tuple[Options, RendezvousPlan]:
    options = parse(argv, environ)
    return options, plan(options, environ, lambda path: "secret of a file").plan


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        (
            "--nnodes 2 --rdzv-endpoint host0:2379 train.py --lr 0.1",
            "elaunch --nnodes 2 --rdzv-endpoint host0:2379 train.py --lr 0.1",
        ),
        (
            "--nnodes=2 --rdzv_endpoint=host0 -m -r3 pkg.mod 'two words'",
            "elaunch --nnodes 2 --rdzv-endpoint host0 --module --redirects 3 pkg.mod 'two words'",
        ),
        (
            "--nnodes 2:3 --rdzv-endpoint a --local-addr 10.0.0.1 --rdzv-conf is_host=1,lease_ttl=5 -- -odd.py",
            "elaunch --nnodes 2:3 --rdzv-endpoint a --rdzv-conf lease_ttl=5 -- -odd.py",
        ),
        (
            "--nnodes 2 --rdzv-endpoint a --rdzv-conf is_host=1 --token-file f -",
            "elaunch --nnodes 2 --rdzv-endpoint a --token-file f -",
        ),
        (
            "--nnodes 2 --node-rank 0 --master-addr host0 --master-port 5 t.py",
            "elaunch --nnodes 2 --master-addr host0 --master-port 5 --node-rank 1 t.py",
        ),
    ],
)
def test_the_line_is_the_same_command_without_what_is_this_nodes_own(typed: str, line: str) -> None:
    assert line_for_others(*asked(*shlex.split(typed)), token="") == line


def test_what_came_from_variables_is_written_out() -> None:
    found = asked("t.py", PET_NNODES="2:4", ELAUNCH_ENDPOINT="host0:5")

    assert line_for_others(*found, token="abc") == (
        "ELAUNCH_TOKEN=abc elaunch --nnodes 2:4 --rdzv-endpoint host0:5 t.py"
    )


@pytest.mark.parametrize(
    ("typed", "environ", "line"),
    [
        (
            "--rdzv-endpoint a --max-restarts 2 t.py",
            {"PET_NNODES": "2", "PET_RDZV_ID": "job 7", "PET_MAX_RESTARTS": "9", "PET_RESTART_WINDOW": "60"},
            "elaunch --nnodes 2 --restart-window 60 --run-id 'job 7' --rdzv-endpoint a --max-restarts 2 t.py",
        ),
        (
            "pkg",
            {
                "PET_NNODES": "2",
                "PET_RDZV_ENDPOINT": "a:5",
                "PET_RDZV_BACKEND": "c10d",
                "PET_NPROC_PER_NODE": "4",
                "PET_MODULE": "1",
                "PET_NO_PRELOAD": "0",
                "PET_RDZV_CONF": "is_host=1,timeout=99",
                "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",
            },
            "elaunch --nnodes 2 --rdzv-endpoint a:5 --nproc-per-node 4 --stop-grace 5 --module --rdzv-backend c10d"
            " --rdzv-conf timeout=99 pkg",
        ),
        (
            "t.py",
            {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "host0", "PET_MASTER_PORT": "5"},
            "elaunch --nnodes 2 --master-addr host0 --master-port 5 --node-rank 1 t.py",
        ),
        (
            "t.py",
            {"PET_NNODES": "2", "PET_RDZV_BACKEND": "static", "PET_RDZV_ENDPOINT": "host0:5", "PET_LOCAL_ADDR": "me"},
            "elaunch --nnodes 2 --rdzv-endpoint host0:5 --rdzv-backend static --node-rank 1 t.py",
        ),
        (
            "--nnodes 2 --node-rank 0 --master-addr host0 t.py",
            {"ELAUNCH_ENDPOINT": "store:7"},
            "ELAUNCH_ENDPOINT=store:7 elaunch --nnodes 2 --master-addr host0 --node-rank 1 t.py",
        ),
        (
            "--nnodes 2 --rdzv-endpoint a --master-port 5:9 t.py",
            {"PET_MASTER_PORT": "5", "PET_TOKEN_FILE": "f", "PET_ROLE": "-x"},
            "elaunch --role=-x --nnodes 2 --rdzv-endpoint a --master-port 5:9 t.py",
        ),
    ],
)
def test_the_other_host_needs_none_of_the_variables_here(typed: str, environ: dict[str, str], line: str) -> None:
    options, made = asked(*shlex.split(typed), **environ)

    assert line_for_others(options, made, token="") == line


@pytest.mark.parametrize(
    "typed",
    [
        "--nnodes 2 --rdzv-endpoint host0:5 -m -- pkg --x",
        "--nnodes 2 --rdzv-endpoint host0:5 --tee 0:3 't .py' '$HOME'",
    ],
)
def test_the_line_means_what_was_typed(typed: str) -> None:
    options, _ = asked(*shlex.split(typed))
    words = shlex.split(line_for_others(*asked(*shlex.split(typed)), token="x y"))

    again, _ = asked(*words[2:])

    assert words[:2] == ["ELAUNCH_TOKEN=x y", "elaunch"]
    assert (again.kind, again.target, again.args) == (options.kind, options.target, options.args)
    assert (again.nnodes, again.rdzv_endpoint, again.tee) == (options.nnodes, options.rdzv_endpoint, options.tee)


def test_a_token_that_was_made_is_shown_and_one_that_was_given_is_not() -> None:
    typed = ("--nnodes", "2", "--rdzv-endpoint", "host0:5", "t.py")

    made = invitation(*asked(*typed), TERMINAL)
    given = invitation(*asked(*typed, ELAUNCH_TOKEN="given-token"), LOG)

    assert made[1] == (
        "on the other node type: ELAUNCH_TOKEN=made-token elaunch --nnodes 2 --rdzv-endpoint host0:5 t.py"
    )
    assert given[1:] == ("on the other node type with the same token: elaunch --nnodes 2 --rdzv-endpoint host0:5 t.py",)


def test_a_log_gets_the_name_of_the_tokens_file_and_not_the_token() -> None:
    said = invitation(*asked("--nnodes", "2", "--rdzv-endpoint", "host0:5", "t.py"), LOG)

    assert said[1] == f"on the other node type: elaunch --token-file {KEPT} --nnodes 2 --rdzv-endpoint host0:5 t.py"
    assert said[2].startswith(
        f"the store's token is in {KEPT}, which only you can read: nodes that share this home find it"
    )
    assert said[2].endswith(f"copy it first (scp host0:{KEPT} token), and type --token-file token")
    assert "made-token" not in "".join(said) + repr(LOG)


@pytest.mark.parametrize("telling", [TERMINAL, LOG])
def test_another_agent_of_the_same_host_needs_no_token(telling: NewToken) -> None:
    said = invitation(*asked("--nnodes", "2", "--rdzv-endpoint", "localhost:5", "t.py"), telling)

    assert said[1:] == ("on the other node type: elaunch --nnodes 2 --rdzv-endpoint localhost:5 t.py",)


@pytest.mark.parametrize("host", ["host0", "localhost"])
def test_a_token_that_no_file_can_keep_is_for_a_terminal_or_for_nobody(host: str) -> None:
    found = asked("--nnodes", "2", "--rdzv-endpoint", f"{host}:5", "t.py")

    assert (
        "ELAUNCH_TOKEN=made " in invitation(*found, NewToken("made", "", "Read-only file system", is_terminal=True))[1]
    )
    with pytest.raises(UsageError, match=r"~/.elaunch/stores \(Read-only file system\); give all nodes the same token"):
        invitation(*found, NewToken("made", "", "Read-only file system", is_terminal=False))


def test_what_the_store_does_not_give_is_said_with_what_does() -> None:
    memory = invitation(*asked("--nnodes", "3", "--rdzv-endpoint", "a:5", "t.py"), LOG)
    etcd = invitation(*asked("--nnodes", "3", "--rdzv-endpoint", "a:5", "--store", "etcd", "t.py"), LOG)

    assert memory[0].startswith(
        "this host serves the job's store at a:5 from its memory: store and job end with this host's"
    )
    assert memory[0].endswith("--rdzv-endpoint of an etcd cluster")
    assert "from an etcd of its own" in etcd[0]
    assert memory[1].startswith("on each other node type: ")


def test_a_static_job_of_more_than_two_nodes_is_told_that_each_has_a_rank_of_its_own() -> None:
    typed = ("--nnodes", "3", "--node-rank", "0", "--master-addr", "a", "t.py")

    said = invitation(*asked(*typed), LOG)

    assert said[1].startswith("on each other node type, with --node-rank 2 and so on after the first of them: ")
    assert said[1].endswith("--node-rank 1 t.py")
