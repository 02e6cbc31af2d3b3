"""The gRPC transport, for an etcd whose gateway cannot be used, and its messages when gRPC fails too."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from elaunch.rendezvous.endpoint import Access, Endpoint, Login, Tls
from elaunch.rendezvous.etcd.grpc_transport import GrpcTransport
from elaunch.rendezvous.etcd.store import EtcdStore
from elaunch.rendezvous.etcd.transport import Json, Rpc
from elaunch.rendezvous.secret import Secret
from elaunch.rendezvous.store import Denied, Put, Txn, Unavailable, Update
from tests.certificates import Certificates
from tests.etcd import VERSIONS, Etcd, client, writes
from tests.harness import DEADLINE_S, free_ports, slow, wait_for
from tests.relay import relay, saying, silent

KEY = "/elaunch/access/x"
LOGIN = Login("agent", "the password")
# etcdctl reads a word.
WORD = Login("agent", "word")


def files(certificates: Certificates) -> Tls:
    return Tls(str(certificates.ca), str(certificates.client), str(certificates.client_key))


def denial(etcd: Etcd, access: Access) -> str:
    with closing(client(etcd.addresses, "grpc", access, DEADLINE_S)) as store, pytest.raises(Denied) as denied:
        store.read(KEY)
    return str(denied.value)


def unavailable(endpoint: Endpoint, deadline_s: float = DEADLINE_S) -> str:
    with closing(client([endpoint], "grpc", deadline_s=deadline_s)) as store, pytest.raises(Unavailable) as error:
        store.read(KEY)
    return str(error.value)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_common_name_beside_users_works(version: str, tmp_path: Path) -> None:
    told: list[Update] = []
    certificates = Certificates(tmp_path, client_name="somebody")
    with (
        Etcd(version, tls=certificates, client_certificates=True, users={LOGIN.user: LOGIN.password}) as etcd,
        closing(client(etcd.addresses, "grpc", Access(files(certificates), LOGIN), DEADLINE_S)) as store,
    ):
        assert store.check().startswith(version)
        store.grant(1, 60)
        store.watch(KEY, store.read(KEY).revision, told.append)
        store.commit(Txn((), (Put(KEY, "1", 1),)))

        wait_for(lambda: told, "word of the write")
        assert store.keep_alive(1) > 0
        store.revoke(1)


def test_what_tls_and_users_refuse_is_said(tmp_path: Path) -> None:
    certificates, other = Certificates(tmp_path / "a"), Certificates(tmp_path / "b")
    with Etcd(tls=certificates, client_certificates=True, users={LOGIN.user: LOGIN.password}) as etcd:
        tls = files(certificates)

        assert "the password of user 'agent' is wrong" in denial(etcd, Access(tls, Login("agent", "wrong")))
        assert "asks for a user and a password" in denial(etcd, Access(tls))
        assert "not trusted" in denial(etcd, Access(files(other), LOGIN))


def test_keys_that_a_user_may_not_use_are_denied_to_calls_and_watches() -> None:
    told: list[Update] = []
    with (
        Etcd(users={LOGIN.user: LOGIN.password}) as etcd,
        closing(client(etcd.addresses, "grpc", Access(login=LOGIN, plainly=True), DEADLINE_S)) as store,
    ):
        with pytest.raises(Denied, match="user 'agent' may not use these keys"):
            store.read("/elsewhere")

        store.watch("/elsewhere", 0, told.append)

        wait_for(lambda: told, "the denial")
        assert [type(update) for update in told] == [Denied]


@pytest.mark.parametrize("version", ["3.4", slow("3.5")])
def test_a_token_that_has_run_out_is_renewed_for_calls_and_for_a_watch_that_is_opened_again(version: str) -> None:
    class Counting(GrpcTransport):
        logins = 0

        def call(self, endpoint: Endpoint, rpc: Rpc, request: Json, token: str, deadline_s: float) -> Json:
            self.logins += rpc is Rpc.AUTHENTICATE
            return super().call(endpoint, rpc, request, token, deadline_s)

    told: list[Update] = []
    access = Access(login=WORD, plainly=True)
    transport = Counting(access)
    with (
        Etcd(version, users={WORD.user: WORD.password}) as etcd,
        relay(etcd.addresses[0]) as way,
        closing(EtcdStore([way.endpoint], access, DEADLINE_S, transport)) as store,
    ):
        store.watch(KEY, store.read(KEY).revision, told.append)
        store.commit(Txn((), (Put(KEY, "1"),)))
        wait_for(lambda: writes(told) == 1, "word of the first write")

        etcd.forget_tokens(WORD.user)
        way.cut()
        way.restore()
        wait_for(lambda: transport.logins > 1, "the watch's new token")
        etcd.ctl("put", KEY, "2")
        wait_for(lambda: writes(told) == 2, "word of the second write")

        logins = transport.logins
        etcd.forget_tokens(WORD.user)
        store.read(KEY)
        assert transport.logins == logins + 1


def test_without_the_package_the_way_out_is_said() -> None:
    program = """
import sys
sys.modules["etcd3"] = None
from elaunch.rendezvous.endpoint import Access
from elaunch.rendezvous.etcd.grpc_transport import GrpcTransport
from elaunch.rendezvous.store import Denied
try:
    GrpcTransport(Access())
except Denied as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180)

    assert done.stdout == "--rdzv-conf transport=grpc needs the package etcd3: pip install 'elaunch[etcd3]'\n"


def test_the_served_store_is_said_to_know_no_grpc() -> None:
    secret = Secret("a token for tests only")

    with pytest.raises(Denied, match="knows no gRPC"):
        GrpcTransport(Access(secret.client_context(), bearer=secret.bearer))


def test_what_is_not_there_hangs_or_is_no_etcd_is_said() -> None:
    (port,) = free_ports(1)
    assert "refuses connections: nobody listens there" in unavailable(Endpoint("127.0.0.1", port))
    with silent() as mute:
        assert unavailable(mute.endpoint, 0.15) == f"no answer from {mute.endpoint} within 0.3 s"
    with saying(b"SSH-2.0-OpenSSH_9.2\r\n") as other:
        assert str(other.endpoint) in unavailable(other.endpoint)


def test_a_users_protobuf_is_left_alone() -> None:
    program = """
import sys
from elaunch.rendezvous.etcd.grpc_transport import load
load()
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
pool = descriptor_pool.Default()
for name in ("rpc.proto", "kv.proto", "auth.proto"):
    try:
        pool.FindFileByName(name)
    except KeyError:
        print(name, "is free")
file = descriptor_pb2.FileDescriptorProto(name="rpc.proto", package="etcdserverpb", syntax="proto3")
file.message_type.add(name="RangeRequest")
pool.AddSerializedFile(file.SerializeToString())
print(load().messages["RangeRequest"](key=b"k").SerializeToString())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180)

    assert done.stdout.splitlines() == [
        "rpc.proto is free",
        "kv.proto is free",
        "auth.proto is free",
        r"b'\n\x01k'",
    ], done.stderr
