"""Many agents in one process, without workers: `python -m bench.crowd` reads orders from stdin and prints results.

Each agent has the product's own client, session and core. Only its actions on workers are simulated, and take no time.
The agents share one loop. In a real job each agent has a processor of its own, which mostly waits.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial

from elaunch.agent.core.actions import Action, Clear, Commit, Join, Log, Renew, SignalWorkers, Spawn, Widen
from elaunch.agent.core.events import Cleared, Event, SnapshotPending, Tag, Tick, WorkerExited
from elaunch.agent.core.state import Agent
from elaunch.agent.core.step import deadline_s, step
from elaunch.agent.session.session import Session
from elaunch.agent.session.store_view import JobStore, LocalHost
from elaunch.rendezvous.endpoint import Endpoint
from elaunch.rendezvous.etcd.store import EtcdStore
from elaunch.rendezvous.etcd.transport import JsonTransport
from elaunch.rendezvous.rules.snapshot import Keys, Snapshot
from elaunch.rendezvous.rules.transactions import join
from elaunch.rendezvous.times import Times
from elaunch.rendezvous.types import Failure, FailureKind, JobSpec, Joined, Node, Program, ProgramKind, RankTable

SLOTS = 8
_PORT = 29500
# A thread that waits for the interpreter lock wakes up once in this time. With hundreds of threads, a shorter time
# would make these wake-ups most of the work.
_SWITCH_S = 0.05


@dataclass
class Milestones:
    """When this process's agents reached each stage of one generation (monotonic s). `seated` agents have ranks."""

    generation: int
    first_s: float = 0.0
    last_s: float = 0.0
    seated: int = 0


@dataclass
class Member:
    """One simulated agent. `due_s` is the time of its next timer in the crowd's heap."""

    agent: Agent
    session: Session
    due_s: float = field(default=float("inf"))


class Crowd:
    """Agents `first` … `first + count - 1` of a job that needs exactly `nodes` nodes."""

    def __init__(self, endpoint: Endpoint, run_id: str, nodes: int, first: int, count: int) -> None:
        self._inbox: queue.SimpleQueue[tuple[int, Event | SnapshotPending | Callable[[], None]]] = queue.SimpleQueue()
        self._timers: list[tuple[float, int]] = []
        self._milestones: dict[int, Milestones] = {}
        self._members = [self._member(endpoint, run_id, nodes, first + i, i) for i in range(count)]
        self._is_over = False

    def _member(self, endpoint: Endpoint, run_id: str, nodes: int, number: int, index: int) -> Member:
        keys, times, host = Keys(run_id), Times(), f"node{number}"
        spec = JobSpec(run_id, Program(ProgramKind.SCRIPT, "train.py"), nodes, nodes)
        node = Node("", host, f"10.0.{number // 256}.{number % 256}", SLOTS)
        store = EtcdStore([endpoint], transport=JsonTransport())
        post = partial(self._post, index)
        session = Session(JobStore(store, keys, is_remote=True), LocalHost(host), times, post)
        return Member(Agent(node, spec, times, Snapshot(keys), progressed=True), session)

    def do(self, what: Callable[[], None]) -> None:
        """Let the loop's own thread call `what` when its turn comes."""
        self._inbox.put((-1, what))

    def open(self) -> None:
        for member in self._members:
            member.session.open()

    def fail(self) -> None:
        """A worker of the first agent is killed."""
        agent = self._members[0].agent
        assert agent.snapshot.generation
        number = agent.snapshot.generation.number
        me = agent.me
        message = "was killed by SIGKILL"
        failure = Failure(FailureKind.SIGNAL, number, me.node_id, me.host, 0, 0, 1, -9, message, progressed=True)
        self._inbox.put((0, WorkerExited(number, 0, -signal.SIGKILL, failure)))

    def end(self) -> None:
        self._is_over = True

    def live(self) -> None:
        """Run the loop until `end` is called."""
        while not self._is_over:
            timeout_s = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
            try:
                index, event = self._inbox.get(timeout=timeout_s)
            except queue.Empty:
                pass
            else:
                if index < 0:
                    assert callable(event)
                    event()
                else:
                    assert not callable(event)
                    self._happen(index, event)
            self._tick()

    def _post(self, index: int, event: Event | SnapshotPending) -> None:
        self._inbox.put((index, event))

    def _happen(self, index: int, event: Event | SnapshotPending) -> None:
        member = self._members[index]
        now_s = time.monotonic()
        if isinstance(event, SnapshotPending):
            event = member.session.snapshot()
        member.agent, actions = step(member.agent, event, now_s)
        for action in actions:
            self._act(index, member, action)
        self._schedule(index, member)

    def _schedule(self, index: int, member: Member) -> None:
        wanted_s = [at_s for at_s in (member.session.due_s, deadline_s(member.agent)) if at_s is not None]
        if wanted_s and min(wanted_s) < member.due_s:
            member.due_s = min(wanted_s)
            heapq.heappush(self._timers, (member.due_s, index))

    def _tick(self) -> None:
        now_s = time.monotonic()
        while self._timers and self._timers[0][0] <= now_s:
            due_s, index = heapq.heappop(self._timers)
            member = self._members[index]
            if due_s != member.due_s:
                continue
            member.due_s = float("inf")
            member.session.tick(now_s)
            agent_due_s = deadline_s(member.agent)
            if agent_due_s is not None and agent_due_s <= now_s:
                self._happen(index, Tick())
            self._schedule(index, member)

    def _act(self, index: int, member: Member, action: Action) -> None:
        match action:
            case Commit(txn, tag):
                member.session.commit(txn, tag)
            case Join():
                me = member.agent.me
                joined = Joined(me.node_id, _PORT, action.progressed)
                member.session.commit(
                    join(member.agent.snapshot, me, joined, action.lease, is_member=action.is_member), Tag.JOIN
                )
            case Renew():
                member.session.renew()
            case Widen():
                member.session.widen()
            case Spawn(table, _):
                self._seated(table)
            case SignalWorkers(generation, local_ranks, signum):
                for local_rank in local_ranks:
                    self._post(index, WorkerExited(generation, local_rank, -signum))
            case Clear(generation):
                self._post(index, Cleared(generation, progressed=True))
            case Log():
                pass
            case _:
                send({"trouble": f"{member.agent.me.host}: {action}"})

    def _reached(self, generation: int) -> Milestones:
        return self._milestones.setdefault(generation, Milestones(generation))

    def _seated(self, table: RankTable) -> None:
        reached, now_s = self._reached(table.generation), time.monotonic()
        reached.first_s = reached.first_s or now_s
        reached.last_s = now_s
        reached.seated += 1
        if reached.seated == len(self._members):
            send(asdict(reached))


def send(message: object) -> None:
    """Send one message to the bench."""
    print(json.dumps(message), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.crowd")
    for name in ("host", "run_id"):
        parser.add_argument(name)
    for name in ("port", "nodes", "first", "count"):
        parser.add_argument(name, type=int)
    options = parser.parse_args()
    sys.setswitchinterval(_SWITCH_S)
    # In a real job each agent has a process of its own, with few objects. Here a garbage collection would go through
    # the objects of a hundred agents, and take long.
    gc.disable()
    crowd = Crowd(Endpoint(options.host, options.port), options.run_id, options.nodes, options.first, options.count)
    orders: dict[str, Callable[[], None]] = {
        "open": crowd.open,
        "fail": crowd.fail,
    }

    def listen() -> None:
        for line in sys.stdin:
            crowd.do(orders[line.strip()])
        crowd.do(crowd.end)

    threading.Thread(target=listen, daemon=True).start()
    send({"ready": options.count})
    crowd.live()


if __name__ == "__main__":
    main()
