"""A record that is not valid costs the node that wrote it, never the job: each key, written over while a job trains."""

from __future__ import annotations

import json

import pytest

from elaunch.agent.core.events import SnapshotChanged
from elaunch.agent.core.state import Exited
from elaunch.rendezvous.store import Put, Txn
from elaunch.rendezvous.types import Outcome, OutcomeKind
from tests.sim.agents import KEYS
from tests.sim.cluster import World
from tests.sim.plans import TIMES, Fault, HostPlan, Plan, Strike, draw

# Two run at first; the third comes when the records are broken, and a worker fails after that.
HOSTS = (HostPlan("host-0", 1), HostPlan("host-1", 1), HostPlan("host-2", 1, start_s=6.0))
SCRIBBLE_S = 4.0
KINDS = (
    *("members", "joined", "failures", "still", "ctl/spec", "ctl/generation", "ctl/table"),
    *("ctl/leader", "ctl/hang"),
)
TEXTS = {
    "garbage": "\x1b]0;x\x07{",
    "empty": "",
    "another version": json.dumps({"version": 9, "kind": "paused", "number": "one", "node_id": ["a"]}),
    "huge": "[" * 500_000,
}


class Scribbled(World):
    """A world in which, at one moment, every key of a kind is written over, on no lease."""

    def __init__(self, plan: Plan, kind: str, text: str, at_s: float = SCRIBBLE_S) -> None:
        super().__init__(plan)
        self.later(at_s, lambda: self._scribble(kind, text))

    def _scribble(self, kind: str, text: str) -> None:
        # What the checks know of the keys would be wrong from now on.
        self.checks.is_garbled = True
        keys = [*self.store.read(f"{KEYS.root}{kind}").entries] or [f"{KEYS.root}{kind}"]
        strangers = [f"{KEYS.root}{kind}/stranger-00000001", f"{KEYS.root}{kind}/0000000000/stranger-00000001"]
        for key in (*keys, *([] if "ctl" in kind else strangers)):
            self.store.commit(Txn((), (Put(key, text),)))

    @property
    def ends(self) -> list[Outcome | None]:
        return [process.outcome for host in self.hosts for process in host.processes]

    @property
    def logged(self) -> list[str]:
        return [
            text
            for _, _, what in self.history
            if isinstance(what, SnapshotChanged)
            for text in what.snapshot.unreadable
        ]


def live(kind: str, text: str) -> Scribbled:
    failure = Fault(9.0, Strike.WORKER, 0)
    world = Scribbled(Plan(1, HOSTS, 2, 3, work_s=15.0, faults=(failure,)), kind, text)
    world.live()
    return world


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_record_that_is_written_over_costs_no_job_and_no_node(kind: str, text: str) -> None:
    world = live(kind, text)

    # The third node joins, and the worker's failure is the only restart.
    ends = [end and (end.kind, end.generation, end.restarts) for end in world.ends]
    assert ends == [(OutcomeKind.SUCCEEDED, 2, 1)] * 3
    # Each key once by each agent that watches it.
    assert 0 < len(world.logged) <= 9
    assert all(f"{KEYS.root}{kind}" in sentence for sentence in world.logged)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_an_outcome_that_is_none_ends_the_job_at_once_with_its_key(text: str) -> None:
    world = live("ctl/ended", text)

    assert {end and end.kind for end in world.ends} == {OutcomeKind.UNKNOWN}
    assert all(end and end.reason.startswith(f"{KEYS.ended} in the store is not a Outcome") for end in world.ends)
    assert max(at_s for at_s, _, what in world.history if isinstance(what, Exited)) < SCRIBBLE_S + TIMES.stop_grace_s


@pytest.mark.parametrize(
    ("seed", "at_s", "kind", "text"),
    [(21300, 17.494, "ctl/generation", "empty"), (20136, 6.187, "ctl/leader", "huge")],
)
def test_a_life_that_once_hung_after_a_scribble_ends(seed: int, at_s: float, kind: str, text: str) -> None:
    world = Scribbled(draw(seed), kind, TEXTS[text], at_s)

    # Raises Violation if an agent waits for ever.
    world.live()


@pytest.mark.parametrize("kind", ["members", "joined", "ctl/generation", "ctl/leader"])
def test_a_leader_that_finds_broken_records_of_the_others_goes_on_with_them(kind: str) -> None:
    killed = Fault(SCRIBBLE_S - 1.0, Strike.KILL, 0)
    world = Scribbled(Plan(1, HOSTS, 2, 3, work_s=15.0, faults=(killed,)), kind, TEXTS["garbage"])

    world.live()

    assert [end and end.kind for end in world.ends] == [None, OutcomeKind.SUCCEEDED, OutcomeKind.SUCCEEDED]


# A generation forms at 0.1 s: a table that has its number and cannot be read would be needed.
@pytest.mark.parametrize("number", ["0", "9" * 5000], ids=["unpadded", "long"])
@pytest.mark.parametrize("at_s", [0.1, SCRIBBLE_S])
def test_a_tables_key_that_no_elaunch_writes_costs_nothing(number: str, at_s: float) -> None:
    world = Scribbled(Plan(1, HOSTS, 2, 3, work_s=15.0), f"ctl/table/{number}", "{", at_s)
    world.live()

    assert [end and end.kind for end in world.ends] == [OutcomeKind.SUCCEEDED] * 3
    assert world.logged
