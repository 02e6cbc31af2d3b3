"""Jobs whose store refuses: a new node ends at once; a node of the job trains on, says why, and recovers."""

from __future__ import annotations

from collections.abc import Iterable
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

# An errand is worth a word after a second or two; a safety read that is refused comes up to a lease time later.
SAID_S = 8.0
AWAY = r"the store (is away|is too slow|refuses what this node asks): .*the workers go on"
BACK = r"the store (is back|does as asked again) after"
# They mean something to the protocol, or to nobody: the request is asked anew, or in another form, and is served.
MEANINGFUL = (answers.LEASE_NOT_FOUND, answers.LEASE_EXISTS, Fault.LOST, *answers.OF_WATCHES)
SOME = (answers.PERMISSION_DENIED, answers.BAD_GATEWAY, answers.CORRUPT)
ALL = tuple(answer for answer in answers.ALL if answer not in MEANINGFUL)


def job(stack: ExitStack, folder: Path, *options: str) -> tuple[list[Refusing], Fleet]:
    etcd = stack.enter_context(Etcd("3.5"))
    proxies = [stack.enter_context(Refusing(etcd)) for _ in range(2)]
    return proxies, stack.enter_context(Fleet(folder, [str(proxy.endpoint) for proxy in proxies], *options))


@pytest.mark.parametrize("table", [SOME, slow(ALL)], ids=["some", "all"])
def test_a_running_job_trains_on_under_each_refusal_says_it_and_goes_on_when_it_is_mended(
    tmp_path: Path, table: Iterable[Answer]
) -> None:
    with ExitStack() as stack:
        proxies, fleet = job(stack, tmp_path / "job")
        fleet.run(0)
        for answer in table:
            heard = len(fleet.agents[1].stderr)
            rule = proxies[1].refuse(Rpc.TXN, answer)
            fleet.says(1, AWAY, SAID_S, after=heard)
            fleet.goes_on(1)
            assert proxies[1].strikes(Rpc.TXN, answer), answer

            rule.end()
            proxies[1].heal()
            fleet.says(1, BACK, SAID_S, after=heard)
        fleet.end()

        assert [agent.wait() for agent in fleet.agents] == [0, 0], fleet.story()
        assert fleet.life(1).generation == 0, fleet.story()  # type: ignore[union-attr]


def test_a_worker_that_fails_while_its_node_is_denied_is_started_again_when_the_node_is_let_in(tmp_path: Path) -> None:
    with ExitStack() as stack:
        proxies, fleet = job(stack, tmp_path / "job")
        fleet.run(0)
        proxies[1].refuse(Rpc.TXN, answers.PERMISSION_DENIED)
        proxies[1].refuse(Rpc.WATCH, answers.PERMISSION_DENIED)

        fleet.kill_worker(1)
        fleet.says(1, r"the store refuses what this node asks: .* no worker can start before it does as asked", SAID_S)
        proxies[1].heal()

        fleet.run(1)
        fleet.end()
        assert [agent.wait() for agent in fleet.agents] == [0, 0], fleet.story()


def test_a_node_whose_watch_is_refused_says_so_once_and_hears_of_failures_by_asking(tmp_path: Path) -> None:
    with ExitStack() as stack:
        proxies, fleet = job(stack, tmp_path / "job")
        fleet.run(0)
        proxies[0].refuse(Rpc.WATCH, answers.BAD_GATEWAY)
        proxies[0].cut_streams()
        fleet.says(0, r"the store refuses to tell of changes: .*HTTP status 502.*; they are read every 3 s", SAID_S)

        fleet.kill_worker(1)

        fleet.run(1)
        assert fleet.agents[0].stderr.count("refuses to tell of changes") == 1, fleet.story()
        fleet.end()
        assert [agent.wait() for agent in fleet.agents] == [0, 0], fleet.story()


@pytest.mark.parametrize(
    ("rpc", "answer", "words"),
    [
        (Rpc.TXN, answers.PERMISSION_DENIED, "asks for a user and a password, and none is given"),
        (Rpc.GRANT, answers.UNKNOWN_METHOD, "this etcd does not know the request"),
        (Rpc.WATCH, answers.NOT_FOUND, "the JSON gateway"),
        (Rpc.TXN, answers.TOO_MANY_OPERATIONS, "--max-txn-ops"),
    ],
    ids=str,
)
def test_a_job_that_is_denied_before_it_began_ends_at_once_with_the_reason(
    tmp_path: Path, rpc: Rpc, answer: Answer, words: str
) -> None:
    with Etcd("3.5") as etcd, Refusing(etcd) as proxy:
        proxy.refuse(rpc, answer)
        with Fleet(tmp_path / "job", [str(proxy.endpoint)] * 2) as fleet:
            codes = [agent.wait(20) for agent in fleet.agents]

            assert codes == [2, 2], fleet.story()
            assert all(words in agent.stderr for agent in fleet.agents), fleet.story()
            assert proxy.strikes(rpc, answer)
