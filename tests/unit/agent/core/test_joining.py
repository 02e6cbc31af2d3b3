"""What the agent of an excluded node says, and that all nodes must name the same --exclude-after."""

from __future__ import annotations

from dataclasses import replace

from elaunch.agent.core.joining import _why_seatless
from elaunch.agent.core.membership import _mismatch
from elaunch.agent.core.state import Agent
from elaunch.rendezvous.rules.snapshot import Snapshot
from elaunch.rendezvous.times import Times
from elaunch.rendezvous.types import Exclusion, RankTable
from tests.unit.agent.driver import SPEC
from tests.unit.agent.job_world import KEYS, A


def test_the_agent_of_an_excluded_node_says_why_and_that_it_stays() -> None:
    agent = Agent(A, replace(SPEC, nodes_max=3), Times(), Snapshot(KEYS))
    why = "the last 3 failures were all on host-a, and alike (signal)"
    table = RankTable(3, (), "", 0, "", excluded=(Exclusion("host-a", "signal", why),))

    assert _why_seatless(agent, table) == (
        f"it is excluded (--exclude-after), since {why}; waiting in case too few others are left"
    )
    assert "excluded" not in _why_seatless(agent, replace(table, excluded=()))


def test_a_node_with_another_exclude_after_does_not_fit_the_job() -> None:
    agent = Agent(A, replace(SPEC, exclude_after=3), Times(), Snapshot(KEYS))

    refused = _mismatch(agent, SPEC.terms)

    assert refused
    assert "--exclude-after 0 there, 3 here" in refused.reason
    assert _mismatch(agent, agent.spec.terms) is None
