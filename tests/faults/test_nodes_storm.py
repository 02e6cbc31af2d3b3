"""Random faults of all kinds on several nodes, drawn from a seed. Then all are mended, and the job must end."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from tests.faults.cluster import Cluster
from tests.faults.meetings import Meeting
from tests.harness import DEADLINE_S, wait_for
from tests.nodes import needs_nodes

pytestmark = needs_nodes

AGENTS = 4
NNODES = "2:4"
# A budget that no storm uses up. The test checks that lost nodes are not charged to it.
OPTIONS = ("--max-restarts", "1000")
# In a job that restarts all the time, newcomers wait longer and longer for a seat, up to a minute.
MENDED_S = 180.0


Mend = Callable[[], None]


class Storm:
    """Faults on one cluster. Each lasts for a random while and is mended before the next begins."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster = cluster
        self._dice = random.Random(seed)
        self.struck: Counter[str] = Counter()

    def strike(self, meeting: Meeting) -> None:
        """One fault, or two at once at different places, for a while."""
        of_nodes = (self.worker, self.agent, self.stopped_agent, self.leave, self.power, self.link, self.cable)
        of_all = (self.etcd, self.stopped_etcd, self.packets)
        where = self._dice.sample(range(AGENTS), k=2)
        strikes: list[Callable[[], Mend]] = [
            *(partial(self._dice.choice(of_nodes), index, meeting) for index in where),
            self._dice.choice(of_all),
        ]
        chosen = self._dice.sample(strikes, k=self._dice.choice([1, 1, 1, 2]))
        for mend in [strike() for strike in chosen]:
            mend()

    def worker(self, index: int, meeting: Meeting) -> Mend:
        """A worker is killed."""
        (rank,) = meeting.ranks_on(self._cluster.nodes[index])
        self.struck["worker"] += 1
        with suppress(ProcessLookupError):
            os.kill(meeting.pid(rank), signal.SIGKILL)
        return lambda: None

    def agent(self, index: int, _: Meeting) -> Mend:
        """An agent is killed, and typed again."""
        self.struck["agent"] += 1
        self._cluster.agents[index].process.kill()
        return lambda: self._again(index)

    def leave(self, index: int, _: Meeting) -> Mend:
        """A node is told to leave, and comes back."""
        self.struck["leave"] += 1
        self._cluster.agents[index].signal(signal.SIGTERM)
        return lambda: self._again(index)

    def power(self, index: int, _: Meeting) -> Mend:
        """A node is lost, and comes back."""
        self.struck["power"] += 1
        node = self._cluster.nodes[index]
        node.power_off()

        def mend() -> None:
            self._pause()
            node.power_on()
            self._again(index)

        return mend

    def stopped_agent(self, index: int, _: Meeting) -> Mend:
        """An agent does nothing for a while."""
        agent = self._cluster.agents[index]
        return self._for_a_while(
            "stopped agent", partial(agent.signal, signal.SIGSTOP), partial(agent.signal, signal.SIGCONT)
        )

    def link(self, index: int, _: Meeting) -> Mend:
        """A node's interface is down for a while."""
        node = self._cluster.nodes[index]
        return self._for_a_while("link", node.link_down, node.link_up)

    def cable(self, index: int, _: Meeting) -> Mend:
        """A node is cut off for a while."""
        node = self._cluster.nodes[index]
        return self._for_a_while("cable", node.unplug, node.plug_in)

    def etcd(self) -> Mend:
        """Etcd is killed, and started again."""
        (member,) = self._cluster.etcd.members
        return self._for_a_while("etcd", member.kill, member.start)

    def stopped_etcd(self) -> Mend:
        """Etcd answers nobody for a while."""
        (member,) = self._cluster.etcd.members
        return self._for_a_while("stopped etcd", member.stop, member.go_on)

    def packets(self) -> Mend:
        """Packets are lost for a while."""
        nodes = self._cluster.nodes
        return self._for_a_while("packets", partial(nodes.lose, self._dice.choice([5, 10, 20])), nodes.heal)

    def _for_a_while(self, name: str, begin: Callable[[], object], end: Callable[[], object]) -> Mend:
        self.struck[name] += 1
        begin()

        def mend() -> None:
            self._pause()
            end()

        return mend

    def _pause(self) -> None:
        # The duration is random: shorter than a lease, about as long, or longer.
        time.sleep(self._dice.uniform(0, 6))

    def _again(self, index: int) -> None:
        self._cluster.agents[index].process.wait(DEADLINE_S)
        self._pause()
        self._cluster.start(index, nnodes=NNODES, options=OPTIONS)


@contextmanager
def printed(cluster: Cluster, seed: int) -> Iterator[None]:
    """Add the seed and the story to any failure."""
    try:
        yield
    except BaseException:
        print(f"seed {seed}\n{cluster.story()}")
        raise


def blow(folder: Path, seed: int, duration_s: float) -> None:
    with Cluster(folder, AGENTS) as cluster, printed(cluster, seed):
        storm = Storm(cluster, seed)
        cluster.start(*range(AGENTS), nnodes=NNODES, options=OPTIONS)
        meeting = cluster.meeting(AGENTS)
        until_s = time.monotonic() + duration_s
        while time.monotonic() < until_s:
            storm.strike(meeting)
            meeting = _met_again(cluster)
        assert sum(storm.struck.values()) > duration_s / 30, storm.struck
        # Each generation had one group, and each rank one worker in it.
        started = Counter((r["generation"], r["rank"]) for r in cluster.records.of("started"))
        assert not [place for place, count in started.items() if count > 1]
        assert meeting.restarts <= storm.struck["worker"], "a loss was charged to the budget"
        cluster.end()
        print(f"seed {seed}: {meeting.generation} generations, {dict(storm.struck)}")


def _met_again(cluster: Cluster) -> Meeting:
    """Wait until all nodes train together again."""
    since = len(cluster.records.all())

    def trains() -> Meeting | None:
        met = cluster.records.meeting(AGENTS)
        return met if met and len(cluster.records.of("step", met.generation, since=since)) > AGENTS else None

    found = wait_for(trains, "all nodes meet again", MENDED_S)
    assert found
    return found


@pytest.mark.slow
def test_a_short_storm_of_faults_ends_well(tmp_path: Path) -> None:
    blow(tmp_path, int(os.environ.get("ELAUNCH_TEST_SEED", "1")), 40)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(6))
def test_a_long_storm_of_faults_ends_well(tmp_path: Path, number: int) -> None:
    blow(tmp_path, int(os.environ.get("ELAUNCH_TEST_SEED", random.randrange(10**6))) + number, 300)
