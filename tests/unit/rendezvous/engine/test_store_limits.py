"""Requests that are too large for the served store, or for its room: answered as a real etcd answers them."""

from __future__ import annotations

import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from elaunch.rendezvous.engine.engine import Engine
from elaunch.rendezvous.engine.mvcc import UNBOUNDED, Refused
from elaunch.rendezvous.engine.request_sizes import LOG_BYTES, MESSAGE_BYTES_MAX, REQUEST_BYTES_MAX
from elaunch.rendezvous.engine.requests import DeleteRequest, PutRequest, RangeRequest, TxnRequest
from tests.etcd import VERSIONS, Etcd
from tests.harness import RUN_LIMIT_S, slow
from tests.served import Gateway, thread_serving

Json = dict[str, Any]
SPACE = "etcdserver: mvcc: database space exceeded"


def text(data: bytes) -> str:
    return b64encode(data).decode()


def put(size: int, key: bytes = b"k") -> Json:
    return {"key": text(key), "value": text(b"x" * size)}


def puts(size: int, *keys: bytes) -> list[Json]:
    return [{"request_put": put(size, key)} for key in keys]


# Around what etcd's gRPC takes, to the byte: its answer says how long the request is. And around what its log takes,
# where a few bytes are its own.
LARGE = [
    *(("/v3/kv/put", put(MESSAGE_BYTES_MAX - less)) for less in (40, 9, 8, 7, 0)),
    *(("/v3/kv/put", put(REQUEST_BYTES_MAX - LOG_BYTES + more)) for more in (-60, 40)),
    ("/v3/kv/put", {**put(MESSAGE_BYTES_MAX), "lease": 300, "prev_kv": True}),
    ("/v3/kv/put", put(1, b"")),
    ("/v3/kv/txn", {"success": puts(800_000, b"a", b"b")}),
    ("/v3/kv/txn", {"failure": puts(800_000, b"a", b"b")}),
    ("/v3/kv/txn", {"success": puts(1_100_000, b"a", b"b")}),
    ("/v3/kv/txn", {"success": puts(16_500, *(b"%d" % number for number in range(128)))}),
    ("/v3/kv/txn", {"success": puts(12_000, *(b"%d" % number for number in range(128)))}),
    ("/v3/kv/txn", {"compare": [{"key": text(b"k"), "target": "VALUE", "value": text(b"x" * 1_600_000)}]}),
    ("/v3/kv/txn", {"compare": [{"key": text(b"k"), "target": "VALUE", "value": text(b"x" * 2_200_000)}]}),
    (
        "/v3/kv/txn",
        {
            "compare": [
                {"key": text(b"k" * 700_000), "range_end": text(b"l"), "target": "MOD", "mod_revision": 5},
                {"key": text(b"k" * 700_000), "target": "CREATE", "result": "GREATER", "create_revision": 0},
                {"key": text(b"k" * 700_000), "target": "LEASE", "result": "LESS", "lease": 2**62},
            ],
            "success": [
                {"request_range": {"key": text(b"k"), "range_end": text(b"l"), "limit": 200, "keys_only": True}},
                {"request_delete_range": {"key": text(b"k"), "range_end": text(b"l"), "prev_kv": True}},
            ],
        },
    ),
    ("/v3/kv/range", {"key": text(b"k" * 1_600_000)}),
    ("/v3/kv/range", {"key": text(b"k" * 2_200_000), "count_only": True, "revision": 1}),
    ("/v3/kv/deleterange", {"key": text(b"k" * 1_600_000)}),
    ("/v3/kv/deleterange", {"key": text(b"k" * 2_200_000)}),
]


@pytest.mark.parametrize("version", [slow(VERSIONS[0]), VERSIONS[-1]])
def test_what_is_too_large_is_refused_as_by_a_real_etcd(version: str) -> None:
    with Etcd(version) as etcd, thread_serving() as (_, port), gateways(etcd, port) as (theirs, ours):
        refused = 0
        for path, body in LARGE:
            expected, found = refusal(theirs, path, body), refusal(ours, path, body)
            assert found == expected, (path, str(body)[:100])
            refused += expected is not None
    assert 10 < refused < len(LARGE)


@pytest.mark.parametrize("version", [slow(VERSIONS[0]), VERSIONS[-1]])
def test_a_full_store_refuses_as_a_real_etcd_does(version: str) -> None:
    quota = 4 << 20
    with (
        Etcd(version, options=(f"--quota-backend-bytes={quota}",)) as etcd,
        thread_serving() as (server, port),
        gateways(etcd, port) as (theirs, ours),
    ):
        server.engine._quota_bytes = quota
        full = (429, 8, SPACE)
        for gateway in (theirs, ours):
            answers = [refusal(gateway, "/v3/kv/put", put(250_000, b"%d" % number)) for number in range(40)]
            assert {*answers} == {None, full}
        for path, body in (
            ("/v3/kv/put", put(1_000_000, b"new")),
            ("/v3/lease/grant", {"ID": 7, "TTL": 60}),
            ("/v3/kv/txn", {"success": puts(1_000_000, b"new")}),
            ("/v3/kv/txn", {"failure": puts(1_000_000, b"new")}),
            ("/v3/kv/txn", {"success": [{"request_range": {"key": text(b"1")}}], "failure": puts(1_000_000, b"new")}),
            ("/v3/kv/range", {"key": text(b"1")}),
            ("/v3/kv/deleterange", {"key": text(b"1")}),
        ):
            if path == "/v3/lease/grant":
                # A lease is smaller than what the last value left.
                server.engine._quota_bytes = 0
            expected, found = refusal(theirs, path, body), refusal(ours, path, body)
            assert found == expected, (path, str(body)[:100])
            server.engine._quota_bytes = quota


@contextmanager
def gateways(etcd: Etcd, port: int) -> Iterator[tuple[Gateway, Gateway]]:
    """A client of each."""
    host, _, etcd_port = etcd.members[0].endpoint.rpartition(":")
    theirs, ours = Gateway(host, int(etcd_port)), Gateway("127.0.0.1", port)
    yield theirs, ours
    theirs.close()
    ours.close()


def refusal(gateway: Gateway, path: str, body: Json) -> tuple[int, int, str] | None:
    """The status, code and words of an error; None where the request was done."""
    status, answer = gateway.call(path, body)
    return None if status == 200 else (status, answer["code"], answer["message"])


@pytest.fixture
def small() -> Engine:
    """With room for about ten values of 10 kB."""
    return Engine(quota_bytes=110_000)


def fill(engine: Engine, size: int = 10_000) -> int:
    """How many values of that size it takes."""
    count = 0
    with suppress(Refused):
        while count < 10_000:
            engine.put(PutRequest(b"%05d" % count, b"x" * size))
            count += 1
    return count


def test_a_full_engine_reads_and_deletes_and_has_room_again_at_once(small: Engine) -> None:
    count = fill(small)
    assert 5 < count < 11
    assert len(small.range(RangeRequest(UNBOUNDED, UNBOUNDED)).kvs) == count

    small.delete(DeleteRequest(b"00001"))

    small.put(PutRequest(b"new", b"x" * 10_000))
    with pytest.raises(Refused, match="space exceeded"):
        small.put(PutRequest(b"newer", b"x" * 10_000))


def test_the_past_is_forgotten_before_the_present_is_refused(small: Engine) -> None:
    for _ in range(1000):
        small.put(PutRequest(b"key", b"x" * 10_000))

    assert small._keys.held_bytes < 110_000
    assert small.range(RangeRequest(b"key")).kvs[0].version == 1000


def test_what_is_held_is_counted_right_whatever_is_put_deleted_and_compacted(small: Engine) -> None:
    keys = small._keys
    for turn in range(2000):
        name = b"%d" % (turn * 7 % 23)
        small.put(PutRequest(name, b"x" * (turn % 50))) if turn % 3 else small.delete(DeleteRequest(name, b"5"))
        if turn % 100 == 50:
            small.compact(small.revision - 3)
        versions = [kv for versions in keys._versions.values() for kv in versions]
        assert keys.held_bytes == sum(len(kv.key) + len(kv.value) + 512 for kv in versions)


def test_leases_and_empty_transactions_take_room_too() -> None:
    engine = Engine(quota_bytes=100_000)

    for number in range(1, 98):
        engine.grant(number, 60)
    with pytest.raises(Refused, match="space exceeded"):
        engine.grant(98, 60)
    assert engine.txn(TxnRequest()).succeeded
    engine.revoke(1)

    engine.grant(1000, 60)


# What a full engine of 16 MiB adds to a process, beside a history that is full too.
MEASURE = """
import sys
from pathlib import Path
from elaunch.rendezvous.engine.requests import PutRequest
from elaunch.rendezvous.engine.engine import Engine
from elaunch.rendezvous.engine.mvcc import Refused

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

engine, size, count, before = Engine(quota_bytes=16 << 20), int(sys.argv[1]), 0, resident()
try:
    while True:
        engine.put(PutRequest(b"%09d" % count, bytes([count % 256]) * size))
        count += 1
except Refused:
    print(resident() - before)
"""


@pytest.mark.parametrize("size", [10, 1000, 100_000])
def test_a_full_store_holds_about_its_quota_of_memory(size: int) -> None:
    held = subprocess.run(
        [sys.executable, "-c", MEASURE, str(size)], stdout=subprocess.PIPE, check=True, timeout=RUN_LIMIT_S
    )

    assert 0.5 < int(held.stdout) / (16 << 20) < 1.25
