"""Jobs whose store refuses: a new node ends at once; a node of the job trains on, says why, and recovers."""

from __future__ import annotations

from pathlib import Path

from elaunch.rendezvous.etcd.transport import Rpc
from tests.etcd import Etcd
from tests.faults import refusing
from tests.faults.fleet import Fleet
from tests.faults.refusing import Refusing

AWAY = r"the store (is away|is too slow|(refuses|denies) what this node asks): .*the workers go on"
BACK = r"the store is back after"
REFUSALS = (refusing.PERMISSION_DENIED, refusing.BAD_GATEWAY, refusing.CORRUPT, refusing.NO_LEADER, refusing.HANG)


def test_a_running_job_trains_on_under_each_refusal_says_it_and_goes_on_when_it_is_mended(tmp_path: Path) -> None:
    with (
        Etcd("3.5") as etcd,
        Refusing(etcd) as proxy,
        Fleet(tmp_path / "job", [etcd.endpoints, str(proxy.endpoint)]) as fleet,
    ):
        fleet.run(0)

        for answer in REFUSALS:
            heard = len(fleet.agents[1].stderr)
            proxy.refuse(Rpc.TXN, answer)
            fleet.says(1, AWAY, after=heard)
            fleet.goes_on(1)
            assert (Rpc.TXN, answer) in proxy.struck

            proxy.heal()
            fleet.says(1, BACK, after=heard)

        life = fleet.life(1)
        assert life
        assert life.generation == 0, fleet.story()
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
