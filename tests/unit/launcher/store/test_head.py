"""launcher.store.head: the job's own store, with real server processes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.network import reach
from elaunch.launcher.store.head import StoreProcess, listen, listen_everywhere, serve, serve_if_head
from elaunch.launcher.store.rendezvous_plan import RendezvousPlan, Serving
from elaunch.rendezvous.endpoint import Access, Endpoint
from elaunch.rendezvous.etcd.discovery import FoundStore
from elaunch.rendezvous.secret import Secret
from elaunch.rendezvous.store import Absent, Denied, Put, Txn, Unavailable
from elaunch.rendezvous.times import Times
from tests.etcd import QUICK, VERSIONS, Etcd
from tests.harness import DEADLINE_S, RUN_LIMIT_S, free_ports, joined, slow, wait_for

KINDS = pytest.mark.parametrize(
    "kind",
    [
        Serving.MEMORY,
        pytest.param(
            Serving.ETCD, marks=pytest.mark.skipif(not shutil.which("etcd"), reason="no etcd on PATH (`make tools`)")
        ),
    ],
)
CALL_S = DEADLINE_S
# A process that does what another agent on this host would do, and then waits to be killed.
SERVE = """
import sys
from elaunch.launcher.store.head import *
from elaunch.launcher.store.rendezvous_plan import Serving
endpoint = Endpoint("127.0.0.1", int(sys.argv[1]))
process = serve(listen(endpoint), Serving(sys.argv[2]), endpoint, "")
print(process.pid, flush=True)
sys.stdin.read()
"""


def place(host: str = "127.0.0.1") -> Endpoint:
    return Endpoint(host, free_ports(1)[0])


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


@contextmanager
def served(kind: Serving, endpoint: Endpoint, token: str = "") -> Iterator[StoreProcess]:
    bound = listen(endpoint)
    assert bound
    process = serve(bound, kind, endpoint, token)
    try:
        yield process
    finally:
        process.stop()


def client(endpoint: Endpoint, token: str) -> FoundStore:
    return FoundStore(endpoint, token, Access(), CALL_S)


@pytest.fixture(scope="module", params=KINDS.args[1])
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[StoreProcess, Endpoint]]:
    """A store of each kind with a token from the shell, for tests that only read."""
    endpoint = place()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("ELAUNCH_TOKEN", TOKEN)
        with served(request.param, endpoint, token=TOKEN) as process:
            yield process, endpoint


TOKEN = "the token of the job, from the variable"


def test_the_store_is_listed_among_processes_with_its_place(running: tuple[StoreProcess, Endpoint]) -> None:
    process, endpoint = running

    shown = psutil.Process(process.pid).cmdline()

    assert " ".join(shown).rstrip() == f"elaunch: job store {endpoint}"


def test_the_token_that_was_made_opens_the_store_that_was_started() -> None:
    endpoint = place()

    with served(Serving.MEMORY, endpoint) as process:
        store = client(endpoint, process.token)
        store.check()

        assert store.commit(Txn((Absent("/a"),), (Put("/a", "1"),))).held
        assert store.read("/").entries["/a"].value == "1"
        store.close()


@KINDS
@pytest.mark.parametrize("host", ["::1", slow("127.0.0.1")])
def test_each_kind_of_store_serves_leases_at_an_address_of_each_family(kind: Serving, host: str) -> None:
    endpoint = place(host)

    with served(kind, endpoint) as process:
        store = client(endpoint, process.token)
        store.check()
        store.grant(7, 600.0)
        store.commit(Txn((), (Put("/a", "1", lease=7),)))
        store.revoke(7)

        assert store.read("/").entries == {}
        store.close()


def test_without_the_jobs_token_nobody_comes_in(running: tuple[StoreProcess, Endpoint]) -> None:
    _, endpoint = running

    with pytest.raises(Denied, match="wants its token"):
        client(endpoint, "").check()
    with pytest.raises(Denied, match="is not that of the store"):
        client(endpoint, "the token of another").check()
    client(endpoint, TOKEN).check()


def test_an_etcd_that_a_head_started_takes_no_client_without_the_certificate() -> None:
    if not shutil.which("etcd"):
        pytest.skip("no etcd on PATH (`make tools`)")
    endpoint, secret = place(), Secret("the token of the job")
    knows_the_server_only = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    knows_the_server_only.check_hostname = False
    knows_the_server_only.load_verify_locations(cadata=secret.certificate)

    def ask() -> bytes:
        with (
            socket.create_connection((endpoint.host, endpoint.port), timeout=CALL_S) as plain,
            knows_the_server_only.wrap_socket(plain) as encrypted,
        ):
            encrypted.send(b"GET /version HTTP/1.1\r\n\r\n")
            return encrypted.recv(1)

    with served(Serving.ETCD, endpoint, token="the token of the job"), pytest.raises(OSError, match="certificate"):
        ask()


@KINDS
def test_the_server_ends_with_the_process_that_started_it(kind: Serving, tmp_path: Path) -> None:
    endpoint = place()
    with subprocess.Popen(
        [sys.executable, "-c", SERVE, str(endpoint.port), kind.value],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as parent:
        assert parent.stdout
        server = psutil.Process(int(parent.stdout.readline()))
        family = [server, *server.children()]
        assert len(family) == (2 if kind is Serving.ETCD else 1)

        parent.kill()

        wait_for(lambda: not any(each.is_running() for each in family), "the end of the server")
    assert list(tmp_path.iterdir()) == []


@KINDS
def test_a_server_that_is_killed_leaves_nothing_behind(
    kind: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with served(kind, place()) as process:
        assert len(list(tmp_path.iterdir())) == (1 if kind is Serving.ETCD else 0)

        psutil.Process(process.pid).kill()

    assert list(tmp_path.iterdir()) == []


def test_a_ctrl_c_at_the_terminal_does_not_reach_the_server(running: tuple[StoreProcess, Endpoint]) -> None:
    process, _ = running

    assert os.getsid(process.pid) != os.getsid(0)
    assert process.exit_code() is None


def test_the_token_is_in_nobodys_sight(running: tuple[StoreProcess, Endpoint]) -> None:
    process, _ = running
    server = psutil.Process(process.pid)

    assert TOKEN not in " ".join(server.cmdline())
    assert "ELAUNCH_TOKEN" not in server.environ()


def test_modules_beside_the_users_script_are_not_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssl.py").write_text("raise SystemExit('not the right ssl')")
    monkeypatch.chdir(tmp_path)

    with served(Serving.MEMORY, place()) as process:
        assert process.exit_code() is None


def test_a_token_that_is_too_short_is_refused_before_anything_is_started() -> None:
    endpoint = place()
    bound = listen(endpoint)
    assert bound

    with pytest.raises(UsageError, match="the job's token has 5 characters"):
        serve(bound, Serving.MEMORY, endpoint, "short")

    socket.create_server((endpoint.host, endpoint.port)).close()


def test_a_server_that_does_not_start_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "etcd"
    broken.write_text("#!/bin/sh\necho 'out of luck' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    endpoint = place()
    bound = listen(endpoint)
    assert bound

    with pytest.raises(SiteError, match=rf"did not start at {endpoint}"):
        serve(bound, Serving.ETCD, endpoint, "")


def test_no_etcd_on_the_path_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    endpoint = place()
    bound = listen(endpoint)
    assert bound

    with pytest.raises(UsageError, match="--store etcd finds no etcd on the PATH"):
        serve(bound, Serving.ETCD, endpoint, "")


# --- who is the head


def plan(endpoint: Endpoint, **changes: object) -> RendezvousPlan:
    return replace(
        RendezvousPlan(endpoints=(endpoint,), serving=Serving.MEMORY, times=Times()),
        **changes,  # type: ignore[arg-type]
    )


def no_words(line: str) -> None:
    raise AssertionError(line)


def test_the_host_of_the_endpoint_serves_the_store() -> None:
    process = serve_if_head(plan(place()), no_words)

    assert process
    process.stop()


def test_what_listens_already_is_left_alone() -> None:
    endpoint = place()

    with socket.create_server((endpoint.host, endpoint.port)):
        assert serve_if_head(plan(endpoint), no_words) is None


@pytest.mark.parametrize(
    "changes", [{"serving": Serving.NOTHING}, {"is_head": False}, {"endpoints": (Endpoint("192.0.2.77", 2379),)}]
)
def test_who_is_not_the_head_serves_nothing(changes: dict[str, object]) -> None:
    assert serve_if_head(plan(place(), **changes), no_words) is None


def test_a_node_that_is_told_to_be_the_head_serves_at_a_name_that_is_a_balancers() -> None:
    endpoint = Endpoint("192.0.2.77", free_ports(1)[0])

    process = serve_if_head(plan(endpoint, is_head=True), no_words)

    assert process
    client(Endpoint("127.0.0.1", endpoint.port), process.token).check()
    client(Endpoint("::1", endpoint.port), process.token).check()
    process.stop()


def test_a_name_of_several_hosts_has_no_head_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = reach.resolve
    monkeypatch.setattr(
        reach,
        "resolve",
        lambda host, port, wait_s: [*resolve("127.0.0.1", port, wait_s), *resolve("192.0.2.77", port, wait_s)],
    )
    said: list[str] = []

    assert serve_if_head(plan(Endpoint("round-robin", free_ports(1)[0])), said.append) is None
    assert "round-robin is the name of several hosts" in said[0]


def test_a_name_that_others_know_by_another_address_is_served_at_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = reach.resolve
    monkeypatch.setattr(
        reach, "resolve", lambda host, port, wait_s: resolve("127.0.1.1" if host == "host0" else host, port, wait_s)
    )

    by_name, by_address = listen(place("host0")), listen(place())

    assert by_name
    assert by_address
    assert (by_name.everywhere, by_address.everywhere) == (True, False)
    by_name.listener.close()
    by_address.listener.close()


def test_two_servers_cannot_have_one_port() -> None:
    endpoint = place()
    one = listen(endpoint)
    assert one

    with one.listener:
        assert listen(endpoint) is None
        assert listen_everywhere(endpoint.port) is None


def test_a_host_that_is_not_this_one_is_refused_where_it_must_be_exact() -> None:
    with pytest.raises(UsageError, match=r"nothing can be served at 192\.0\.2\.77:9: Cannot assign requested address"):
        listen(Endpoint("192.0.2.77", 9), exactly=True)
    with pytest.raises(UsageError, match=r"the name no-such-host\.invalid has no address here"):
        listen(Endpoint("no-such-host.invalid", 9), exactly=True)


def test_nothing_answers_after_the_end() -> None:
    endpoint = place()
    with served(Serving.MEMORY, endpoint) as process:
        token = process.token
        os.kill(process.pid, signal.SIGKILL)
        wait_for(lambda: process.exit_code() is not None, "the end of the server")

    with pytest.raises(Unavailable):
        client(endpoint, token).check()


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


def test_a_server_that_ends_while_it_is_asked_is_tried_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = Endpoint("127.0.0.1", listener.getsockname()[1])

        def hang_up() -> None:
            for _ in range(2):
                listener.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(Unavailable):
            client(endpoint, "the token of the job").check()
        joined(thread)


def test_an_etcd_whose_agent_ended_before_it_named_a_token_is_not_started(tmp_path: Path) -> None:
    folder = tmp_path / "etcd"
    folder.mkdir()

    run = subprocess.run(
        [sys.executable, "-m", "elaunch.launcher.store.etcd_process", "no-such-etcd", "127.0.0.1:1", str(folder)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=RUN_LIMIT_S,
    )

    assert (run.returncode, run.stderr) == (0, b"")
    assert not folder.exists()
