"""Jobs whose store refuses: a new node ends at once; a node of the job trains on, says why, and recovers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from elaunch.rendezvous.etcd.transport import Rpc
from tests.etcd import Etcd
from tests.faults import answers
from tests.faults.answers import Answer, Fault
from tests.faults.fleet import Fleet
from tests.faults.refusing import Refusing
from tests.harness import slow

AWAY = r"the store (is away|is too slow|refuses what this node asks): .*the workers go on"
BACK = r"the store is back after"
# Answers that the agent handles without a word: it repeats the request, or sends another one, which succeeds.
MEANINGFUL = (answers.LEASE_NOT_FOUND, answers.LEASE_EXISTS, Fault.LOST, *answers.OF_WATCHES)
SOME = (answers.PERMISSION_DENIED, answers.BAD_GATEWAY, answers.CORRUPT)
ALL = tuple(answer for answer in answers.ALL if answer not in MEANINGFUL)


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


@pytest.mark.parametrize("table", [SOME, slow(ALL)], ids=["some", "all"])
def test_a_running_job_trains_on_under_each_refusal_says_it_and_goes_on_when_it_is_mended(
    job: Job, table: Iterable[Answer]
) -> None:
    proxies, fleet, generation = job.running()

    for answer in table:
        heard = len(fleet.agents[1].stderr)
        rule = proxies[1].refuse(Rpc.TXN, answer)
        fleet.says(1, AWAY, after=heard)
        fleet.goes_on(1)
        assert proxies[1].strikes(Rpc.TXN, answer), answer

        rule.end()
        proxies[1].heal()
        fleet.says(1, BACK, after=heard)

    assert fleet.life(1).generation == generation, fleet.story()  # type: ignore[union-attr]
    fleet.goes_on(1)


def test_a_worker_that_fails_while_its_node_is_denied_is_started_again_when_the_node_is_let_in(job: Job) -> None:
    proxies, fleet, generation = job.running()
    heard = len(fleet.agents[1].stderr)
    proxies[1].refuse(Rpc.TXN, answers.PERMISSION_DENIED)
    proxies[1].refuse(Rpc.WATCH, answers.PERMISSION_DENIED)

    fleet.kill_worker(1)
    said = r"the store refuses what this node asks: .* no worker can start before it is back"
    fleet.says(1, said, after=heard)
    proxies[1].heal()

    fleet.run(generation + 1)
    fleet.goes_on(1)


def test_a_node_whose_watch_is_refused_says_so_once_and_hears_of_failures_by_asking(job: Job) -> None:
    proxies, fleet, generation = job.running()
    heard = len(fleet.agents[0].stderr)
    proxies[0].refuse(Rpc.WATCH, answers.BAD_GATEWAY)
    proxies[0].cut_streams()
    said = r"the store refuses to tell of changes: .*HTTP status 502.*; they are read every 3 s"
    fleet.says(0, said, after=heard)

    fleet.kill_worker(1)

    fleet.run(generation + 1)
    assert fleet.agents[0].stderr[heard:].count("refuses to tell of changes") == 1, fleet.story()
    fleet.goes_on(0)


def test_a_job_that_was_refused_now_and_then_ends_well(job: Job) -> None:
    _, fleet, _ = job.running()

    fleet.end()

    assert [agent.wait() for agent in fleet.agents] == [0, 0], fleet.story()


@pytest.mark.parametrize(
    ("rpc", "answer", "words"),
    [
        (Rpc.TXN, answers.PERMISSION_DENIED, "asks for a user and a password, and none is given"),
        slow(Rpc.GRANT, answers.UNKNOWN_METHOD, "this etcd does not know the request"),
        slow(Rpc.WATCH, answers.NOT_FOUND, "the JSON gateway"),
        slow(Rpc.TXN, answers.TOO_MANY_OPERATIONS, "--max-txn-ops"),
    ],
    ids=str,
)
def test_a_job_that_is_denied_before_it_began_ends_at_once_with_the_reason(
    tmp_path: Path, rpc: Rpc, answer: Answer, words: str
) -> None:
    with Etcd("3.5") as etcd, Refusing(etcd) as proxy:
        proxy.refuse(rpc, answer)
        with Fleet(tmp_path / "job", [str(proxy.endpoint)] * 2) as fleet:
            codes = [agent.wait() for agent in fleet.agents]

            assert codes == [2, 2], fleet.story()
            assert all(words in agent.stderr for agent in fleet.agents), fleet.story()
            assert proxy.strikes(rpc, answer)
