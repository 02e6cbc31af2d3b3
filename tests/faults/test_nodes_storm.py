"""Random faults of all kinds on several nodes, drawn from a seed, and what must hold after each of them.

After each fault the job continues, ends, or logs a reason within 15 s. It has one outcome on all nodes, each rank runs
once in each generation, and nothing is left on the nodes.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.etcd import Member
from tests.faults.cluster import Cluster, LightCluster
from tests.faults.meetings import Meeting
from tests.harness import DEADLINE_S, wait_for
from tests.nodes import needs_nodes

pytestmark = needs_nodes

AGENTS = 3
NNODES = "2:3"
# The members of etcd have nodes of their own, or node 0 serves the store.
STORES = {"etcd": {"count": 6, "members_on": [3, 4, 5]}, "served": {"count": 3, "head": True}}
# A budget that no storm uses up. The test checks that lost nodes are not charged to it.
OPTIONS = ("--max-restarts", "1000")
# In a job that restarts all the time, newcomers wait longer and longer for a seat, up to a minute.
RECOVERED_S = 180.0
# The limit for a line about a stall, and that for the next one while the stall lasts.
SILENCE_S, REMINDER_S = 15.0, 75.0

Restore = Callable[[], None]


class Silence(threading.Thread):
    """Finds stalls of a job that no agent logs; use it as a context manager. `found` describes them."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(daemon=True)
        self.found: list[str] = []
        self._cluster = cluster
        self._over = threading.Event()

    def __enter__(self) -> Silence:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join(DEADLINE_S)

    def run(self) -> None:
        steps = lines = -1
        step_s = line_s = time.monotonic()
        while not self._over.wait(0.2):
            now_s, agents = time.monotonic(), list(self._cluster.agents.values())
            records = self._cluster.folder / "records"
            if (seen := records.stat().st_size if records.exists() else 0) != steps:
                steps, step_s = seen, now_s
            # A process that ends counts as a line.
            if (seen := sum(len(each.stderr) + (each.process.poll() is not None) for each in agents)) != lines:
                lines, line_s = seen, now_s
            if all(each.process.poll() is not None for each in agents):
                step_s = now_s
            # The line may come just before the last record that another rank writes.
            is_silent = now_s - step_s > SILENCE_S and line_s < step_s - 2.0
            if is_silent or (now_s - step_s > SILENCE_S and now_s - line_s > REMINDER_S):
                quiet = f"no step for {now_s - step_s:.0f} s, no line for {now_s - line_s:.0f} s"
                self.found.append(f"{quiet}\n{self._cluster.story()}")
                step_s = line_s = now_s


class Storm:
    """Faults on one cluster. Each lasts for a random while and is undone before the next begins."""

    def __init__(self, cluster: Cluster, dice: random.Random, store: str) -> None:
        self._cluster = cluster
        self._dice = dice
        self._store = store
        self.struck: Counter[str] = Counter()
        self.history: list[str] = []
        # The nodes that are not typed again: without the head's store the job ends.
        self.ended: set[int] = set()

    def strike(self, meeting: Meeting) -> None:
        """One fault, or two at once at different places, for a while."""
        of_processes = (self.worker, self.workers, self.exit, self.stopped_worker, self.fork_server, self.guardian)
        of_nodes = (*of_processes, self.agent, self.stopped_agent, self.leave, self.power, self.link, self.cable)
        of_all = (self.packets, self.cut, *((self.etcd, self.stopped_etcd) if self._store == "etcd" else ()))
        where = self._dice.sample(range(AGENTS), k=2)
        strikes: list[Callable[[], Restore]] = [
            *(partial(self._dice.choice(of_nodes), index, meeting) for index in where),
            self._dice.choice(of_all),
        ]
        chosen = self._dice.sample(strikes, k=self._dice.choice([1, 1, 1, 2]))
        for restore in [strike() for strike in chosen]:
            restore()

    def worker(self, index: int, meeting: Meeting) -> Restore:
        """A worker is killed."""
        return self._kill_ranks("worker", meeting, meeting.ranks_on(self._cluster.nodes[index]))

    def workers(self, _: int, meeting: Meeting) -> Restore:
        """All workers are killed at the same time."""
        return self._kill_ranks("workers", meeting, sorted(meeting.records))

    def exit(self, index: int, meeting: Meeting) -> Restore:
        """A worker exits with code 7 after its next step."""
        self._note("exit", index)
        for rank in meeting.ranks_on(self._cluster.nodes[index]):
            self._cluster.ask("exit 7", generation=meeting.generation, rank=rank)
        return lambda: None

    def stopped_worker(self, index: int, meeting: Meeting) -> Restore:
        """A worker does nothing for a while."""
        pids = [meeting.pid(rank) for rank in meeting.ranks_on(self._cluster.nodes[index])]

        def send(signum: signal.Signals) -> None:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signum)

        return self._for_a_while("stopped worker", index, partial(send, signal.SIGSTOP), partial(send, signal.SIGCONT))

    def fork_server(self, index: int, _: Meeting) -> Restore:
        """The fork server is killed."""
        self._note("fork server", index)
        with suppress(psutil.Error):
            self._cluster.agents[index].fork_server().kill()
        return lambda: None

    def guardian(self, index: int, _: Meeting) -> Restore:
        """The guardian is killed."""
        self._note("guardian", index)
        with suppress(psutil.Error):
            self._cluster.agents[index].guardian().kill()
        return lambda: None

    def agent(self, index: int, _: Meeting) -> Restore:
        """An agent is killed, and typed again."""
        self._note("agent", index)
        self._cluster.agents[index].process.kill()
        return lambda: self._again(index)

    def leave(self, index: int, _: Meeting) -> Restore:
        """A node leaves after SIGTERM, and joins again."""
        self._note("leave", index)
        self._cluster.agents[index].signal(signal.SIGTERM)
        return lambda: self._again(index)

    def power(self, index: int, _: Meeting) -> Restore:
        """A node is lost, and comes back."""
        self._note("power", index)
        node = self._cluster.nodes[index]
        node.power_off()

        def restore() -> None:
            self._pause()
            node.power_on()
            self._again(index)

        return restore

    def stopped_agent(self, index: int, _: Meeting) -> Restore:
        """An agent does nothing for a while."""
        agent = self._cluster.agents[index]
        stop, go_on = partial(agent.signal, signal.SIGSTOP), partial(agent.signal, signal.SIGCONT)
        return self._for_a_while("stopped agent", index, stop, go_on)

    def link(self, index: int, _: Meeting) -> Restore:
        """A node's interface is down for a while."""
        node = self._cluster.nodes[index]
        return self._for_a_while("link", index, node.link_down, node.link_up)

    def cable(self, index: int, _: Meeting) -> Restore:
        """A node is cut off for a while."""
        node = self._cluster.nodes[index]
        return self._for_a_while("cable", index, node.unplug, node.plug_in)

    def etcd(self) -> Restore:
        """Members of etcd are killed, and started again."""
        members = self._members()
        return self._for_a_while(f"{len(members)} etcd", -1, *(_each(members, name) for name in ("kill", "start")))

    def stopped_etcd(self) -> Restore:
        """Members of etcd do not answer for a while."""
        members = self._members()
        stopped = f"{len(members)} stopped etcd"
        return self._for_a_while(stopped, -1, *(_each(members, name) for name in ("stop", "go_on")))

    def cut(self) -> Restore:
        """Two nodes do not reach each other for a while; both reach the others."""
        nodes = self._cluster.nodes
        one, other = self._dice.sample(range(AGENTS), k=2)
        return self._for_a_while("cut", one * 10 + other, partial(nodes.cut, nodes[one], nodes[other]), nodes.heal)

    def packets(self) -> Restore:
        """Packets are lost for a while."""
        nodes = self._cluster.nodes
        return self._for_a_while("packets", -1, partial(nodes.lose, self._dice.choice([5, 10, 20])), nodes.heal)

    def _members(self) -> list[Member]:
        return self._dice.sample(self._cluster.etcd.members, k=self._dice.choice([1, 1, 2]))

    def _kill_ranks(self, name: str, meeting: Meeting, ranks: Sequence[int]) -> Restore:
        self._note(name, *ranks)
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(meeting.pid(rank), signal.SIGKILL)
        return lambda: None

    def _for_a_while(self, name: str, index: int, begin: Callable[[], object], end: Callable[[], object]) -> Restore:
        self._note(name, index)
        begin()

        def restore() -> None:
            self._pause()
            end()

        return restore

    def _note(self, name: str, *where: int) -> None:
        self.struck[name] += 1
        self.history.append(f"{time.monotonic():.1f} {name} {' '.join(map(str, where))}")

    def _pause(self) -> None:
        # The duration is random: shorter than a lease, about as long, or longer.
        time.sleep(self._dice.uniform(0, 6))

    def _again(self, index: int) -> None:
        self._cluster.agents[index].process.wait(DEADLINE_S)
        if self._store == "served" and index == 0:
            self.ended.add(index)
        if self.ended:
            return
        self._pause()
        self._cluster.start(index, nnodes=NNODES, options=OPTIONS)


def _each(members: Sequence[Member], name: str) -> Callable[[], None]:
    def act() -> None:
        for member in members:
            getattr(member, name)()

    return act


@contextmanager
def printed(cluster: Cluster, seed: int, history: Sequence[str] = ()) -> Iterator[None]:
    """Add the seed and the story to any failure."""
    try:
        yield
    except BaseException:
        print(f"seed {seed}: {history}\n{cluster.story()}")
        raise


def blow(folder: Path, seed: int, faults: int, store: str, kind: type[Cluster] = Cluster) -> Storm:
    """A job that `faults` strike, one after the other, from its start to its end."""
    folder.mkdir(exist_ok=True)
    with kind(folder, **STORES[store]) as cluster, Silence(cluster) as silence:  # type: ignore[arg-type]
        storm = Storm(cluster, random.Random(seed), store)
        with printed(cluster, seed, storm.history):
            cluster.start(*range(AGENTS), nnodes=NNODES, options=OPTIONS)
            meeting = cluster.meeting(AGENTS)
            while not storm.ended and sum(storm.struck.values()) < faults:
                storm.strike(meeting)
                if not storm.ended:
                    meeting = _met_again(cluster)
            # Each generation had one group, and each rank one worker in it.
            started = Counter((r["generation"], r["rank"]) for r in cluster.records.of("started"))
            assert not [place for place, count in started.items() if count > 1]
            charged = (
                storm.struck["worker"] + storm.struck["workers"] + storm.struck["exit"] + storm.struck["fork server"]
            )
            assert meeting.restarts <= charged, "a loss was charged to the budget"
            if storm.ended:
                _ended_without_store(cluster, storm)
            else:
                cluster.end()
            assert not silence.found, silence.found
        print(f"seed {seed}: {meeting.generation} generations, {dict(storm.struck)}")
        return storm


def _ended_without_store(cluster: Cluster, storm: Storm) -> None:
    """The others end with one code and a reason, and leave nothing."""
    others = {i: agent for i, agent in cluster.agents.items() if i not in storm.ended}
    codes = {i: agent.wait() for i, agent in others.items() if agent.process.poll() != -signal.SIGKILL}
    assert len(set(codes.values()) - {128 + signal.SIGTERM}) <= 1, codes
    assert all(code > 0 for code in codes.values()), codes
    for i in codes:
        assert others[i].logged_by_agent(), f"node {i} ended without a line"
        cluster.assert_nothing_is_left(cluster.nodes[i])


def _met_again(cluster: Cluster) -> Meeting:
    """Wait until all nodes train together again."""
    since = len(cluster.records.all())

    def trains() -> Meeting | None:
        met = cluster.records.meeting(AGENTS)
        return met if met and len(cluster.records.of("step", met.generation, since=since)) > AGENTS else None

    found = wait_for(trains, "all nodes meet again", RECOVERED_S)
    assert found
    return found


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES)
def test_a_short_storm_of_faults_ends_well(tmp_path: Path, store: str) -> None:
    blow(tmp_path, int(os.environ.get("ELAUNCH_TEST_SEED", "1")), 4, store)


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES)
def test_an_hour_of_jobs_under_faults_ends_well(tmp_path: Path, store: str) -> None:
    seed = int(os.environ.get("ELAUNCH_TEST_SEED", random.randrange(10**6)))
    until_s = time.monotonic() + float(os.environ.get("ELAUNCH_TEST_SOAK_S", "3600"))
    struck: Counter[str] = Counter()
    failed: list[str] = []
    while time.monotonic() < until_s:
        # One job of four with torch: the others leave the CPUs to the agents.
        kind = LightCluster if seed % 4 else Cluster
        try:
            struck += blow(tmp_path / str(seed), seed, random.Random(seed).randint(2, 8), store, kind).struck
        except AssertionError as error:
            failed.append(f"seed {seed} with {store}: {error}")
            print(failed[-1], flush=True)
        seed += 1
    print(f"{sum(struck.values())} faults: {dict(struck)}")
    assert not failed, "\n".join(failed)
