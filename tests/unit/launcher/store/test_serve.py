"""launcher.store.serve: the job's own store, with real server processes."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from elaunch.launcher import host as reach
from elaunch.launcher.store.locate import RendezvousPlan
from elaunch.launcher.store.serve import COMMAND as STORE
from elaunch.launcher.store.serve import StoreProcess, listen, serve, serve_if_head
from elaunch.rendezvous.endpoint import Access, Endpoint
from elaunch.rendezvous.etcd.discovery import FoundStore
from elaunch.rendezvous.store import Absent, Denied, Put, Txn
from elaunch.rendezvous.times import Times
from tests.commands import read
from tests.etcd import QUICK, VERSIONS, Etcd
from tests.harness import COMMAND, DEADLINE_S, environment, finished, free_ports

CALL_S = DEADLINE_S


def place(host: str = "127.0.0.1") -> Endpoint:
    return Endpoint(host, free_ports(1)[0])


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


@contextmanager
def served(endpoint: Endpoint) -> Iterator[StoreProcess]:
    listener = listen(endpoint)
    assert listener
    process = serve(listener, endpoint, "")
    try:
        yield process
    finally:
        process.stop()


def client(endpoint: Endpoint, token: str) -> FoundStore:
    return FoundStore(endpoint, token, Access(), CALL_S)


def test_the_token_that_was_made_opens_the_store_that_was_started() -> None:
    endpoint = place("::1")

    with served(endpoint) as process:
        store = client(endpoint, process.token)
        store.check()

        assert store.commit(Txn((Absent("/a"),), (Put("/a", "1"),))).held
        assert store.read("/").entries["/a"].value == "1"
        store.close()


def test_a_stores_process_shows_its_token_to_no_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELAUNCH_TOKEN", "the token of the shell")

    with served(place()) as process:
        server = psutil.Process(process.process.pid)

        assert process.token not in " ".join(server.cmdline())
        assert "ELAUNCH_TOKEN" not in server.environ()


def plan(endpoint: Endpoint, **changes: object) -> RendezvousPlan:
    return replace(
        RendezvousPlan(endpoints=(endpoint,), serves=True, times=Times()),
        **changes,  # type: ignore[arg-type]
    )


def no_log(line: str) -> None:
    raise AssertionError(line)


def test_the_host_of_the_endpoint_serves_the_store() -> None:
    process = serve_if_head(plan(place()), no_log)

    assert process
    process.stop()


def test_a_node_that_is_set_as_the_head_serves_at_a_name_that_is_a_balancers() -> None:
    endpoint = Endpoint("192.0.2.77", free_ports(1)[0])

    process = serve_if_head(plan(endpoint, is_head=True), no_log)

    assert process
    client(Endpoint("127.0.0.1", endpoint.port), process.token).check()
    client(Endpoint("::1", endpoint.port), process.token).check()
    process.stop()


def test_a_name_of_several_hosts_has_no_head_and_that_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = reach.resolve
    monkeypatch.setattr(
        reach,
        "resolve",
        lambda host, port, wait_s: [*resolve("127.0.0.1", port, wait_s), *resolve("192.0.2.77", port, wait_s)],
    )
    printed: list[str] = []

    assert serve_if_head(plan(Endpoint("round-robin", free_ports(1)[0])), printed.append) is None
    assert "round-robin is the name of several hosts" in printed[0]


def test_a_name_that_others_know_by_another_address_is_served_at_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = reach.resolve
    monkeypatch.setattr(
        reach, "resolve", lambda host, port, wait_s: resolve("127.0.1.1" if host == "host0" else host, port, wait_s)
    )

    by_name, by_address = listen(place("host0")), listen(place())

    assert by_name
    assert by_address
    assert (by_name.getsockname()[0], by_address.getsockname()[0]) == ("::", "127.0.0.1")
    by_name.close()
    by_address.close()


@pytest.mark.parametrize("version", VERSIONS)
def test_an_etcd_without_the_token_is_spoken_to_unless_the_job_has_one(version: str) -> None:
    with Etcd(version, options=QUICK) as etcd:
        endpoint = Endpoint("127.0.0.1", int(etcd.endpoints.rpartition(":")[2]))
        for token in ("", "the token of the job"):
            store = client(endpoint, token)
            assert store.check()
            assert store.read("/").entries == {}
            store.close()

        # The process that was faster to bind the port.
        only_ours = FoundStore(endpoint, "the token of the job", Access(), CALL_S, expects_ours=True)
        with pytest.raises(Denied, match=f"what listens at {endpoint} does not know the job's token"):
            only_ours.check()


@pytest.mark.parametrize(
    ("argv", "listens"),
    [
        ([], ("0.0.0.0", 2379)),
        (["--listen", ":29400"], ("0.0.0.0", 29400)),
        (["--listen=29400"], ("0.0.0.0", 29400)),
        (["--listen", "[fd00::1]:7"], ("fd00::1", 7)),
    ],
)
def test_where_it_listens_is_a_host_with_a_port_or_a_port_of_all_addresses(
    argv: list[str], listens: tuple[str, int]
) -> None:
    assert read(STORE, *argv).params["listen"] == listens


def test_a_store_whose_token_no_one_could_learn_is_not_served(tmp_path: Path) -> None:
    job = finished(tmp_path, "store", "--listen", "127.0.0.1:0", env={"HOME": "/proc"})

    assert job.code == 2
    assert "stderr is not a terminal, and no file can be written in ~/.elaunch/stores (" in job.stderr
    assert "give all nodes the same token: export ELAUNCH_TOKEN=$(openssl rand -hex 16)" in job.stderr


def test_at_a_terminal_the_token_is_in_the_line(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [*COMMAND, "store", "--listen", "0.0.0.0:0"]
    with subprocess.Popen(command, env=environment({"HOME": str(tmp_path)}), stderr=theirs, text=True) as store:
        os.close(theirs)
        printed = b""
        while b"Ctrl-C ends the store" not in printed:
            printed += os.read(ours, 4096)
        kept = list((tmp_path / ".elaunch" / "stores").iterdir())
        store.terminate()
    os.close(ours)

    assert len(kept) == 1
    assert re.search(rb"ELAUNCH_TOKEN=[0-9a-f]{32} elaunch --nnodes 2 ", printed)
    assert not kept[0].exists()
