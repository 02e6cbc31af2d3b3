"""A job on a real etcd that is full: the log says so, training goes on, and so does the job once etcd has room."""

from __future__ import annotations

import http.client
import json
from base64 import b64encode
from collections.abc import Iterator

import pytest

from tests.etcd import VERSIONS, Etcd
from tests.faults.fleet import Fleet
from tests.harness import slow

QUOTA_BYTES = 4 << 20
# One line with etcd's own name of the trouble, and the three things to do about it.
WAY_OUT = "^" + "".join(f"(?=.*{word})" for word in ("NOSPACE", "compact", "defrag", "disarm"))


def fill(etcd: Etcd) -> None:
    """Write until etcd raises its alarm."""
    connection = http.client.HTTPConnection(etcd.members[0].endpoint, timeout=180)
    value = b64encode(b"x" * 500_000).decode()
    for _ in range(100):
        connection.request("POST", "/v3/kv/put", json.dumps({"key": b64encode(b"/filler").decode(), "value": value}))
        response = connection.getresponse()
        if b"database space exceeded" in response.read():
            break
    connection.close()
    assert "NOSPACE" in etcd.ctl("alarm", "list")


def mend(etcd: Etcd) -> None:
    """Do what etcd's manual says about a full etcd."""
    status = json.loads(etcd.ctl("endpoint", "status", "-w", "json"))
    etcd.compact(status[0]["Status"]["header"]["revision"])
    etcd.ctl("defrag")
    etcd.ctl("alarm", "disarm")


@pytest.fixture(scope="module", params=[slow(each) if each == "3.4" else each for each in VERSIONS])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Etcd, Fleet]]:
    """A job that runs, on an etcd with little room."""
    with (
        Etcd(request.param, options=(f"--quota-backend-bytes={QUOTA_BYTES}",)) as etcd,
        Fleet(tmp_path_factory.mktemp("full") / "job", [etcd.endpoints] * 2) as fleet,
    ):
        yield etcd, fleet


def test_a_full_etcd_is_said_with_the_way_out_and_the_job_goes_on_when_it_is_mended(job: tuple[Etcd, Fleet]) -> None:
    etcd, fleet = job
    fleet.run(0)
    # A full 3.5 refuses reads in transactions too: it may be said before anything fails.
    said = len(fleet.agents[1].stderr)
    fill(etcd)
    for node in (0, 1):
        fleet.goes_on(node)

    assert fleet.kill_worker(1)

    fleet.says(1, WAY_OUT, after=said)
    # The failure cannot be written, so the other node does not learn of it. Its worker is healthy and goes on.
    fleet.goes_on(0)
    assert fleet.life(0).generation == 0, fleet.story()  # type: ignore[union-attr]
    assert [agent.process.poll() for agent in fleet.agents] == [None, None], fleet.story()

    mend(etcd)

    fleet.run(1)
