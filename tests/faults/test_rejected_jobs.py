"""Jobs whose store refuses: a new node ends at once; a node of the job trains on, says why, and recovers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from elaunch.rendezvous.etcd.transport import Rpc
from tests.etcd import Etcd
from tests.faults import refusing
from tests.faults.fleet import Fleet
from tests.faults.refusing import Refusing

AWAY = r"the store (is away|is too slow|refuses what this node asks): .*the workers go on"
BACK = r"the store is back after"
REFUSALS = (refusing.PERMISSION_DENIED, refusing.BAD_GATEWAY, refusing.CORRUPT, refusing.NO_LEADER, refusing.HANG)


class Job:
    """A job of two nodes that reach the etcd each by its own proxy, at which one test after another refuses requests.

    If an earlier test has not left the whole job running, a new job is started. Use it as a context manager.
    """

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._stack = ExitStack()
        self._now: tuple[list[Refusing], Fleet] | None = None

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def running(self) -> tuple[list[Refusing], Fleet, int]:
        """The proxies, which refuse nothing now, the agents, whose workers live, and their generation."""
        if not self._is_whole():
            self._stack.close()
            etcd = self._stack.enter_context(Etcd("3.5"))
            proxies = [self._stack.enter_context(Refusing(etcd)) for _ in range(2)]
            fleet = Fleet(self._folders.mktemp("jobs") / "job", [str(proxy.endpoint) for proxy in proxies])
            self._now = proxies, self._stack.enter_context(fleet)
        assert self._now
        proxies, fleet = self._now
        fleet.run(0)
        life = fleet.life(1)
        assert life
        return proxies, fleet, life.generation

    def _is_whole(self) -> bool:
        if not self._now:
            return False
        proxies, fleet = self._now
        for proxy in proxies:
            proxy.heal()
        return all(agent.process.poll() is None for agent in fleet.agents) and all(map(fleet.is_alive, (0, 1)))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with Job(tmp_path_factory) as made:
        yield made


def test_a_running_job_trains_on_under_each_refusal_says_it_and_goes_on_when_it_is_mended(job: Job) -> None:
    proxies, fleet, generation = job.running()

    for answer in REFUSALS:
        heard = len(fleet.agents[1].stderr)
        proxies[1].refuse(Rpc.TXN, answer)
        fleet.says(1, AWAY, after=heard)
        fleet.goes_on(1)
        assert (Rpc.TXN, answer) in proxies[1].struck

        proxies[1].heal()
        fleet.says(1, BACK, after=heard)

    assert fleet.life(1).generation == generation, fleet.story()  # type: ignore[union-attr]
    fleet.goes_on(1)


def test_a_job_that_is_denied_before_it_began_ends_at_once_with_the_reason(tmp_path: Path) -> None:
    with Etcd("3.5") as etcd, Refusing(etcd) as proxy:
        proxy.refuse(Rpc.TXN, refusing.PERMISSION_DENIED)
        with Fleet(tmp_path / "job", [str(proxy.endpoint)] * 2) as fleet:
            codes = [agent.wait() for agent in fleet.agents]

            assert codes == [2, 2], fleet.story()
            words = "asks for a user and a password, and none is given"
            assert all(words in agent.stderr for agent in fleet.agents), fleet.story()
            assert (Rpc.TXN, refusing.PERMISSION_DENIED) in proxy.struck
