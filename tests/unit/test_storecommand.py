"""`elaunch store`, run as a user does."""

from __future__ import annotations

import re
import signal
import socket
from pathlib import Path

import psutil
import pytest

from elaunch.launcher.errors import UsageError
from elaunch.launcher.storecommand import HELP, announcement, parse
from elaunch.rendezvous.access import Access
from elaunch.rendezvous.discovery import FoundStore
from elaunch.rendezvous.plan import Endpoint
from elaunch.rendezvous.store import Put, Txn
from tests.harness import Job, finished, wait_for


@pytest.mark.parametrize(
    ("argv", "endpoint", "port"),
    [
        ([], None, 2379),
        (["--listen", ":29400"], None, 29400),
        (["--listen=0.0.0.0:7"], None, 7),
        (["--listen", "*:7"], None, 7),
        (["--listen", "[::]:7"], None, 7),
        (["--listen", "host0"], Endpoint("host0", 2379), 2379),
        (["--listen", "[fd00::1]:7"], Endpoint("fd00::1", 7), 7),
    ],
)
def test_where_it_listens_is_an_endpoint_or_a_port_of_all_addresses(
    argv: list[str], endpoint: Endpoint | None, port: int
) -> None:
    request = parse(argv, {})

    assert (request.endpoint, request.port) == (endpoint, port)


def test_the_token_is_in_a_file_or_the_variable(tmp_path: Path) -> None:
    path = tmp_path / "to_ken"
    path.write_text("from the file\n".replace(" ", "-"))

    assert parse([], {}).token == ""
    assert parse([], {"ELAUNCH_TOKEN": "from-variable"}).token == "from-variable"
    for word in ("--token-file", "--token_file"):
        assert parse([word, str(path)], {"ELAUNCH_TOKEN": "from-variable"}).token == "from-the-file"
        assert parse([f"{word}={path}"], {}).token == "from-the-file"


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["train.py"], "store takes no program, and train.py looks like one; a script called store is started with"),
        (["--token", "x"], "--token would show the job's secret to everybody; set ELAUNCH_TOKEN, or give --token-file"),
        (["--listen", "a:b"], "--listen a:b is no endpoint; use HOST:PORT"),
        (["--listen", "a:1,b:2"], "--listen a:1,b:2 is no HOST:PORT of this host; give one"),
        (["--listen", "https://a:1"], "--listen https://a:1 is no HOST:PORT of this host"),
        (["--lisen", "a:1"], "see elaunch store --help"),
        (["--listen"], "see elaunch store --help"),
    ],
)
def test_a_wrong_request_is_one_sentence(argv: list[str], sentence: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse(argv, {})

    assert sentence in str(raised.value)


def test_a_given_token_is_not_shown() -> None:
    place = Endpoint("host0", 2379)

    assert (
        "ELAUNCH_TOKEN=made elaunch --nnodes 2 --rdzv-endpoint host0:2379"
        in announcement(place, "made", is_ours=True)[0]
    )
    assert "given" not in " ".join(announcement(place, "given", is_ours=False))


def test_a_store_in_the_foreground_serves_who_has_the_token_until_ctrl_c(tmp_path: Path) -> None:
    with Job(tmp_path, "store", "--listen", "127.0.0.1:0") as job:
        line = job.wait_for_output(r"ELAUNCH_TOKEN=(\w+) elaunch --nnodes 2 --rdzv-endpoint 127\.0\.0\.1:(\d+) ")
        store = FoundStore(Endpoint("127.0.0.1", int(line[2])), line[1], Access(), 5.0)
        store.check()
        assert store.commit(Txn((), (Put("/a", "1"),))).held
        store.close()

        job.signal(signal.SIGINT)

        assert job.wait() == 0
    assert re.search(r"^elaunch: the store ends, by SIGINT$", job.stderr, re.MULTILINE)
    assert "nothing is left when it is started again; a cluster of etcd outlives any host" in job.stderr
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(line[2])), timeout=5).close()


def test_a_store_that_was_told_to_outlive_its_terminal_does(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # As nohup does; the child inherits it.
    try:
        job = Job(tmp_path, "store", "--listen", "127.0.0.1:0")
    finally:
        signal.signal(signal.SIGHUP, before)
    with job:
        job.wait_for_output("Ctrl-C ends it")

        job.signal(signal.SIGHUP)
        job.signal(signal.SIGTERM)

        assert job.wait() == 0
    assert "the store ends, by SIGTERM" in job.stderr


def test_a_server_that_is_killed_ends_the_command_with_a_sentence(tmp_path: Path) -> None:
    with Job(tmp_path, "store", "--listen", "127.0.0.1:0") as job:
        job.wait_for_output("ELAUNCH_TOKEN=")
        server = wait_for(lambda: psutil.Process(job.process.pid).children(), "the server")[0]

        server.kill()

        assert job.wait() == 3
    assert "the store's server ended by itself, with exit code -9" in job.stderr


def test_a_taken_port_is_a_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = finished(tmp_path, "store", "--listen", f"127.0.0.1:{port}")

    assert job.code == 2
    assert f"something listens at 127.0.0.1:{port} already; choose another port with --listen HOST:PORT" in job.stderr


def test_help_is_a_text_and_a_script_called_store_is_started_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("print('the script')")
    (tmp_path / "store").chmod(0o755)

    assert finished(tmp_path, "store", "--help").stdout == HELP
    assert "the script" in finished(tmp_path, "--nproc-per-node", "1", "--no-preload", "./store").stdout
    assert max(len(line) for line in HELP.splitlines()) <= 100
