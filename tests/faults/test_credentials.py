"""A listener at the endpoint gets no password and no token: it writes down every byte that arrives."""

from __future__ import annotations

import base64
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from elaunch.launcher.store.token import store_token
from elaunch.rendezvous.endpoint import Access, Login, Tls
from elaunch.rendezvous.etcd.grpc_transport import GrpcTransport
from elaunch.rendezvous.etcd.store import EtcdStore
from elaunch.rendezvous.etcd.transport import RpcTransport
from elaunch.rendezvous.secret import Secret
from elaunch.rendezvous.store import Denied
from tests.certificates import Certificates
from tests.harness import DEADLINE_S, LIGHT, Job, slow, wait_for
from tests.relay import Listener

PASSWORD = "the password of the team's etcd"
TOKEN = "the token of this very job"
LOGIN = {"ETCDCTL_USER": "me", "ETCDCTL_PASSWORD": PASSWORD}
ANSWER = b'{"version":"3.5.0","token":"stolen","header":{"cluster_id":"7","revision":"1"},"succeeded":true,"TTL":"9"}'
SLURM = {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
}


class Eavesdropper(Listener):
    """Answers every request as an etcd without users or TLS would, and keeps the bytes that it receives.

    With `certificates` it speaks TLS with a certificate of its own, and keeps the decrypted bytes.
    """

    def __init__(self, certificates: Certificates | None = None) -> None:
        self.received = b""
        self._context: ssl.SSLContext | None = None
        if certificates:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(certificates.server, certificates.server_key)
        super().__init__(self._answer)
        self.place = str(self.endpoint)

    def has_received(self, secret: str) -> bool:
        forms = (secret.encode(), base64.b64encode(secret.encode()).rstrip(b"="))
        return any(form in self.received for form in forms)

    def _answer(self, asking: socket.socket) -> None:
        stream = self._context.wrap_socket(asking, server_side=True) if self._context else asking
        while data := stream.recv(65536):
            self.received += data
            if data.startswith((b"GET", b"POST")):
                stream.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(ANSWER) + ANSWER)


@pytest.fixture
def listener() -> Iterator[Eavesdropper]:
    with Eavesdropper() as made:
        yield made


def attempted(folder: Path, listener: Eavesdropper, words: str, env: Mapping[str, str]) -> Job:
    """Run a job until it ends or has sent a secret. {} in `words` stands for the endpoint."""
    (folder / "pw").write_text(f"{PASSWORD.replace(' ', '-')}\n")
    (folder / "token").write_text(f"{TOKEN.replace(' ', '-')}\n")
    (folder / "train.py").write_text("")
    (folder / "job.yaml").write_text(f"rdzv_endpoint: {listener.place}\nrdzv_conf: user=me,password_file=pw\n")
    argv = [*LIGHT, "--nproc-per-node", "1", "--nnodes", "2", *words.replace("{}", listener.place).split(), "train.py"]
    environ = {name: value.replace("{}", listener.place) for name, value in env.items()}
    with Job(folder, *argv, env={"HOME": str(folder), "TMPDIR": str(folder), **environ}) as job:
        wait_for(lambda: job.process.poll() is not None or given_away(listener), "its end")
        if job.process.poll() is not None:
            job.wait()
    return job


def given_away(listener: Eavesdropper) -> list[str]:
    bearers = [Secret(each).bearer for each in (TOKEN, TOKEN.replace(" ", "-"))]
    secrets = (PASSWORD, PASSWORD.replace(" ", "-"), TOKEN, TOKEN.replace(" ", "-"), *bearers)
    return [secret for secret in secrets if listener.has_received(secret)]


@pytest.mark.parametrize(
    ("words", "env"),
    [
        ("--rdzv-endpoint {}", {"ETCDCTL_USER": f"me:{PASSWORD}"}),
        slow("--rdzv-endpoint {}", LOGIN),
        ("--rdzv-endpoint {} --rdzv-conf user=me,password_file=pw", {}),
        slow("--rdzv-endpoint {},{}", LOGIN),
        slow("--rdzv-endpoint {} --rdzv-backend etcd", LOGIN),
        ("--rdzv-endpoint {} --rdzv-conf transport=grpc", LOGIN),
        ("--config job.yaml", {}),
        slow("", {**LOGIN, "ELAUNCH_ENDPOINT": "{}"}),
        slow("", {**LOGIN, "ETCDCTL_ENDPOINTS": "{},{}"}),
        ("", {"PET_RDZV_ENDPOINT": "{}", "PET_RDZV_CONF": "user=me,password_file=pw"}),
        # Variables of a scheduler, under which the nodes derive a token.
        ("--rdzv-endpoint {} --rdzv-conf is_host=0", {**LOGIN, **SLURM, "SLURM_NODEID": "1"}),
    ],
)
def test_a_password_is_not_sent_without_tls_unless_http_was_typed(
    tmp_path: Path, listener: Eavesdropper, words: str, env: dict[str, str]
) -> None:
    job = attempted(tmp_path, listener, words, env)

    assert given_away(listener) == []
    assert job.code == 2
    assert "password of etcd's user me " in job.stderr
    assert f"type https://{listener.place}" in job.stderr
    assert f"http://{listener.place}" in job.stderr


@pytest.mark.parametrize("words", ["--rdzv-endpoint http://{}", "--rdzv-endpoint {} --rdzv-conf protocol=http"])
def test_a_password_is_sent_where_http_was_typed_and_that_is_logged_once(
    tmp_path: Path, listener: Eavesdropper, words: str
) -> None:
    job = attempted(tmp_path, listener, words, LOGIN)

    assert given_away(listener) == [PASSWORD]
    assert job.stderr.count("the password of etcd's user me goes unencrypted to") == 1
    assert PASSWORD not in job.output


@pytest.mark.parametrize("transport", ["gateway", "grpc"])
def test_no_client_of_an_etcd_sends_a_password_without_tls_unless_plainly_is_set(
    listener: Eavesdropper, transport: str
) -> None:
    access = Access(login=Login("me", PASSWORD))
    by: RpcTransport | None = GrpcTransport(access) if transport == "grpc" else None
    with closing(EtcdStore([listener.endpoint], access, DEADLINE_S, by)) as store:
        for call in (store.check, lambda: store.read("/"), lambda: store.grant(1, 5)):
            with pytest.raises(Denied, match="the password of etcd's user me is not sent; type https://"):
                call()

    assert listener.received == b""


def test_a_server_that_the_authority_does_not_know_gets_no_password(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
    access = Access(Tls(str(Certificates(ours).ca)), Login("me", PASSWORD))
    with (
        Eavesdropper(Certificates(theirs)) as listener,
        closing(EtcdStore([listener.endpoint], access, DEADLINE_S)) as store,
    ):
        with pytest.raises(Denied, match="not trusted"):
            store.check()

        assert listener.received == b""


@pytest.mark.parametrize(
    ("words", "env", "sentence"),
    [
        slow("--rdzv-endpoint {}", {"ELAUNCH_TOKEN": TOKEN}, "does not know the job's token"),
        slow("--rdzv-endpoint {} --token-file token", {}, "does not know the job's token"),
        ("--rdzv-endpoint {} --rdzv-backend c10d", {"ELAUNCH_TOKEN": TOKEN}, "does not know the job's token"),
    ],
)
def test_a_plain_response_where_a_token_was_given_is_refused(
    tmp_path: Path, listener: Eavesdropper, words: str, env: dict[str, str], sentence: str
) -> None:
    job = attempted(tmp_path, listener, words, env)

    assert (job.code, given_away(listener)) == (2, [])
    assert sentence in job.stderr


def test_an_etcd_that_was_not_named_as_one_is_used_with_a_line(tmp_path: Path, listener: Eavesdropper) -> None:
    (tmp_path / "train.py").write_text("")
    argv = [*LIGHT, "--nproc-per-node", "1", "--nnodes", "2", "--rdzv-endpoint", listener.place, "train.py"]
    with Job(tmp_path, *argv, env={"HOME": str(tmp_path)}) as job:
        job.wait_for_output(
            rf"the store at {listener.place} is an etcd without TLS: .*type --rdzv-endpoint http://{listener.place}"
        )


def test_a_plain_response_where_this_users_own_store_is_known_to_be_is_refused(
    tmp_path: Path, listener: Eavesdropper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    store_token(TOKEN, listener.endpoint)

    job = attempted(tmp_path, listener, "--rdzv-endpoint {}", {})

    assert (job.code, given_away(listener)) == (2, [])
    assert f" shows that your elaunch serves a store with a token at {listener.place}, but what answers" in job.stderr


def test_a_tls_server_without_the_token_gets_nothing_of_it(tmp_path: Path) -> None:
    with Eavesdropper(Certificates(tmp_path)) as listener:
        job = attempted(tmp_path, listener, "--rdzv-endpoint {}", {"ELAUNCH_TOKEN": TOKEN, **LOGIN})

        assert listener.received == b""
    assert job.code == 2
    assert f"the token here is not that of the store at {listener.place}" in job.stderr


@pytest.mark.parametrize("node", ["0", "1"])
def test_under_a_scheduler_a_plain_response_is_refused_by_the_head_and_logged_by_the_others(
    tmp_path: Path, listener: Eavesdropper, node: str
) -> None:
    (tmp_path / "train.py").write_text("")
    # For other nodes the endpoint is no address of their host. Here all nodes are on one host, so is_host says it.
    conf = ("--rdzv-conf", f"is_host={1 - int(node)}")
    argv = [*LIGHT, "--nproc-per-node", "1", "--rdzv-endpoint", listener.place, *conf, "train.py"]
    with Job(tmp_path, *argv, env={"HOME": str(tmp_path), **SLURM, "SLURM_NODEID": node}) as job:
        if node == "0":
            assert job.wait() == 2
            assert "does not know the job's token: it is an etcd" in job.stderr
        else:
            job.wait_for_output("is an etcd without TLS: anybody who can reach it can read and change the job")


@pytest.mark.parametrize("tls", [None, Tls()])
def test_there_is_no_access_that_shows_a_bearer_to_anybody_but_the_tokens_own_store(tls: Tls | None) -> None:
    with pytest.raises(ValueError, match="only to the store whose certificate is made from the same token"):
        Access(tls, bearer=Secret(TOKEN).bearer)
