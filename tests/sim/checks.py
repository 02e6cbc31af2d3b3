"""The checks after every write to the store, after every step of an agent, and at the end."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elaunch.agent.core.events import Cleared, Event, GroupFailed, WorkerEnded, WorkerExited
from elaunch.agent.core.state import Agent, Clearing, Exited, Finished, Joining, Running, Stopping
from elaunch.rendezvous.codec import decode
from elaunch.rendezvous.rules.assign_ranks import role_of_node
from elaunch.rendezvous.rules.hang_verdict import Hang
from elaunch.rendezvous.rules.restart_policy import failure_mode, is_excluded
from elaunch.rendezvous.rules.snapshot import decode_table
from elaunch.rendezvous.store import Changes, KeyEntry, NoneNewer, Put, Txn, Update
from elaunch.rendezvous.types import (
    Failure,
    Generation,
    Joined,
    Node,
    OpenKind,
    Outcome,
    OutcomeKind,
    RankTable,
    Terms,
    host_of,
)
from tests.sim.agents import KEYS, AgentProcess
from tests.sim.groups import INT, KILL, Worker
from tests.sim.plans import Program

if TYPE_CHECKING:
    from tests.sim.cluster import World


# Limits for one agent in one second. They are high, since a leader of many nodes has busy moments.
STEPS_A_SECOND_MAX = 150
CALLS_A_SECOND_MAX = 60


class Violation(AssertionError):
    """A check failed. `rule` names the check briefly."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


@dataclass
class Run:
    """One run with the job's id."""

    terms: Terms
    first: int
    ended: Outcome | None = None
    counted_s: list[float] = field(default_factory=list)
    table: RankTable | None = None
    last_member_s: float = math.inf
    began_s: float = 0.0
    # The most seats that each role has had.
    seats: Counter[str] = field(default_factory=Counter)


class Checks:
    """Follows every revision of the store, and every step."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.writer: tuple[AgentProcess, Txn] | None = None
        self.runs: list[Run] = []
        self.tables: dict[int, RankTable] = {}
        self.hung: set[int] = set()
        self.opened: list[tuple[float, Generation]] = []
        self.is_garbled = False
        self._opened_calmly = 0
        self._owners: dict[str, AgentProcess] = {}
        self._cleared: set[tuple[str, int]] = set()
        # The revision at which a node ceased to be a member.
        self._left: dict[str, int] = {}
        # The agent that began each lease for a run's keys, and the leases that a run's keys were on.
        self._begun_for_runs: dict[int, AgentProcess] = {}
        self._stood_on: set[int] = set()
        self._have_joined: set[tuple[int, str]] = set()
        # The keys as they are, by their kind.
        self.generation: Generation | None = None
        self.leader = ""
        self.members: dict[str, Node] = {}
        self.joined: dict[int, dict[str, Joined]] = {}
        self.done: dict[int, set[str]] = {}
        self.failures: dict[int, dict[str, Failure]] = {}
        self.standing: dict[int, RankTable] = {}
        world.store.watch(KEYS.root, 0, self._told)

    @property
    def run(self) -> Run:
        return self.runs[-1]

    def _require(self, holds: object, rule: str, text: str) -> None:
        if not holds and rule not in self._world.ignored:
            raise Violation(rule, text)

    # The store.

    def granted(self, process: AgentProcess, lease: int, ttl_s: float) -> None:
        if ttl_s == process.client._times.keys_ttl_s:
            self._begun_for_runs.setdefault(lease, process)

    def _told(self, update: Update) -> None:
        assert isinstance(update, Changes)
        if self.is_garbled:
            return
        parts = {key: key[len(KEYS.root) :].split("/") for key in update.entries}
        for key, entry in update.entries.items():
            self._require(entry is None or entry.lease, "lease", f"{key} would never go away")
            if key == KEYS.spec and entry:
                self._stood_on.add(entry.lease)
        # A generation or table that a transaction writes is checked against the keys before that transaction. So its
        # deletions come last.
        for key, entry in update.entries.items():
            if entry and parts[key][0] == "ctl":
                self._ctl(parts[key], entry, update)
        for key in sorted(update.entries, key=lambda key: parts[key][0] != "members"):
            entry = update.entries[key]
            if entry and parts[key][0] != "ctl":
                self._put(parts[key], entry)
        for key, entry in update.entries.items():
            if not entry:
                self._delete(parts[key], update.revision)

    def _ctl(self, parts: list[str], entry: KeyEntry, update: Changes) -> None:
        match parts:
            case ["ctl", "generation"]:
                self._open(decode(Generation, entry.value), update)
            case ["ctl", "table", _]:
                assert self.writer
                view = next(guard.revision for guard in self.writer[1].guards if isinstance(guard, NoneNewer))
                self._seal(decode_table(entry.value), view)
            case ["ctl", "leader"]:
                is_start = KEYS.generation in update.entries
                self._require(is_start or not self.leader, "leader", f"{entry.value} leads beside {self.leader}")
                self._require(is_start or entry.value in self.members, "leader", f"{entry.value} leads, no member")
                self.leader = entry.value
            case ["ctl", "ended"]:
                self._end(decode(Outcome, entry.value))
            case ["ctl", "hang"]:
                self._hang(decode(Hang, entry.value))

    def _hang(self, hang: Hang) -> None:
        """The leader gives the verdict, once, on a job whose ranks all wait."""
        world, table = self._world, self.run.table
        world.log("store", f"{hang}")
        self._by_leader(hang)
        self._require(table and table.generation == hang.generation, "hang", f"{hang} while {table} runs")
        group = world.groups[hang.generation]
        is_whole = all(worker.is_alive for worker in group.workers.values())
        self._require(group.is_hung or not is_whole, "hang", f"{hang}, but its ranks work")
        self._require(hang.generation not in self.hung, "hang", f"{hang} comes twice")
        self.hung.add(hang.generation)

    def _open(self, opened: Generation, update: Changes) -> None:
        world, now, kind = self._world, self.generation, opened.kind
        world.log("store", f"generation {opened.number}: {kind.value}: {opened.cause}")
        self._require(opened.number == (now.number + 1 if now else 0), "opening", f"{opened} after {now}")
        self.opened.append((world.now_s, opened))
        self.generation = opened
        if not world.is_rough and world.plan.program is Program.GOOD:
            self._opened_calmly += 1
            is_few = self._opened_calmly <= 3 + 2 * len(world.hosts)
            self._require(is_few, "endless", f"{self._opened_calmly} generations since all is well")
        if kind is OpenKind.START:
            self._require(not self.members, "opening", f"a new run while {list(self.members)} are members")
            if self.runs and not self.run.ended:
                world.wiped += [p.name for p in world.alive if p.living and not p.is_stopped]
            spec = update.entries[KEYS.spec]
            assert spec
            self.runs.append(Run(decode(Terms, spec.value), opened.number, began_s=world.now_s))
            world.run_started()
            return
        assert now
        table = self.run.table
        self._require(not self.run.ended, "opening", f"{opened} after the end")
        self._require(table, "opening", f"{opened} before there was a table")
        assert table
        if table.generation < now.number:
            named = kind in (OpenKind.FAIL, OpenKind.LOSS) and now.kind in (OpenKind.JOIN, OpenKind.LEAVE)
            self._require(named, "opening", f"{kind.value} while one forms for {now.kind.value}")
        done = self.done.get(table.generation, set())
        match kind:
            case OpenKind.FAIL:
                record = KEYS.failure(table.generation, opened.node_id)
                self._require(update.entries.get(record), "opening", f"{opened} without the failure's record")
                self._require(table.group_rank(opened.node_id) is not None, "opening", f"{opened} by one without seat")
            case OpenKind.LEAVE:
                self._require(table.group_rank(opened.node_id) is not None, "opening", f"{opened} by one without seat")
                self._require(opened.node_id not in done, "lost", f"{opened}, and it was done")
            case OpenKind.LOSS:
                self._by_leader(opened)
                excused = {now.node_id} if now.kind is OpenKind.LEAVE and table.generation < now.number else set()
                gone = {s.node_id for s in table.seats} - set(self.members) - excused
                self._require(gone, "lost", f"{opened}, but no node is")
                self._require(gone - done, "lost", f"{opened}, but who is gone was done")
            case OpenKind.JOIN:
                self._by_leader(opened)
                seated = {seat.node_id for seat in table.seats}
                ready = set(self.joined.get(table.generation, {})) - seated
                self._require(ready, "join", f"{opened}, but no node is ready")
                self._require(len(table.seats) < self.run.terms.nodes_max, "join", f"{opened}, but no seat is free")
                self._require(not done, "join", f"{opened}, but {done} are done")

    def _seal(self, table: RankTable, view: int) -> None:
        """`view` is the revision of the leader's snapshot. A node that leaves later is found lost soon after."""
        world, run, g, before = self._world, self.run, table.generation, self.run.table
        nodes = [seat.node_id for seat in table.seats]
        world.log("store", f"table {g}: {nodes} restarts {table.restarts}: {table.reason}")
        self._by_leader(table)
        self._require(g not in self.tables, "one table", f"a second table in generation {g}")
        self._require(self.generation and g == self.generation.number, "stale", f"table {g} in {self.generation}")
        self._require(not run.ended, "stale", f"table {g} after the end")
        ranks = [seat.first_rank + n for seat in table.seats for n in range(seat.slots)]
        self._require(ranks == list(range(table.world_size)), "ranks", f"{ranks}")
        self._require(len(set(nodes)) == len(nodes), "ranks", f"{nodes}")
        within = run.terms.nodes_min <= len(nodes) <= run.terms.nodes_max
        self._require(within, "ranks", f"{len(nodes)} nodes for {run.terms}")
        for seat in table.seats:
            self._require((g, seat.node_id) in self._have_joined, "seat", f"{seat} for one that has not joined")
            self._require(seat.slots == self._owners[seat.node_id].host.plan.slots, "ranks", f"{seat}")
        self._require_stopped(g)
        self._seat_roles(table)
        if before:
            self._require(not self._final(before.generation), "code", f"table {g} after {before}")
            kept = [n for n in (s.node_id for s in before.seats) if n in self.members or self._left.get(n, 0) > view]
            stays = [n for n in kept if n in nodes or not is_excluded(n, table.excluded)]
            base = [*(n for n in nodes if n in stays), *(n for n in nodes if n not in stays)]
            self._require(base[: len(stays)] == stays[: len(nodes)], "order", f"{nodes} after {stays}")
            self._side_by_side(nodes, base)
            self._exclude(table, before)
            self._charge(table, before, lost=[s.node_id for s in before.seats if s.node_id not in kept])
        else:
            self._side_by_side(nodes, nodes)
            self._require(table.restarts == 0, "budget", f"{table.restarts} restarts in the first table")
        run.table = self.tables[g] = self.standing[g] = table

    def _side_by_side(self, nodes: list[str], base: list[str]) -> None:
        """`nodes` are `base`, with the nodes of each topology where its first one is."""
        places = [self._owners[node_id].host.plan.topology for node_id in base]
        grouped = [base[i] for i in sorted(range(len(base)), key=lambda i: places.index(places[i]))]
        self._require(nodes == grouped, "place", f"{nodes} of {base} in {places}")

    def _seat_roles(self, table: RankTable) -> None:
        """No role is ever without a node, and none gets a seat that another role has had."""
        run, now = self.run, Counter(role_of_node(seat.role, seat.slots) for seat in table.seats)
        self._require(now.keys() >= run.seats.keys(), "role", f"{now} has none of {run.seats.keys() - now.keys()}")
        run.seats |= now
        self._require(run.seats.total() <= run.terms.nodes_max, "role", f"{now} after {run.seats}")

    def _exclude(self, table: RankTable, before: RankTable) -> None:
        """An excluded node has failed often enough, stays out while others suffice, and is not forgotten."""
        world, terms, g = self._world, self.run.terms, table.generation
        out = [seat.node_id for seat in table.seats if is_excluded(seat.node_id, table.excluded)]
        others = [n for n in self.joined.get(g, {}) if n in self.members and not is_excluded(n, table.excluded)]
        plans = [self._owners[n].host.plan for n in others]
        # A spare of another role replaces nobody. With several roles the others may be enough, and of the wrong ones.
        fit = [plan for plan in plans if role_of_node(plan.role, plan.slots) in self.run.seats]
        is_needed = len(fit) < terms.nodes_min or len(self.run.seats) > 1
        self._require(not out or is_needed, "excluded", f"{out} have seats, {others} are there")
        failed = [failure for failures in self.failures.values() for failure in failures.values()]
        for each in set(before.excluded) - set(table.excluded):
            elsewhere = [f for f in failed if failure_mode(f) == each.way and host_of(f.node_id) != each.who]
            self._require(elsewhere, "forgotten", f"{each} in table {g}")
        for each in set(table.excluded) - set(before.excluded):
            real = [
                number
                for number, workers in world.real_failures.items()
                if any(worker.process.host.name == each.who for worker in workers)
            ]
            self._require(len(real) >= terms.exclude_after > 0, "blamed", f"{each}, which failed in {real}")

    def _require_stopped(self, g: int) -> None:
        """No member runs workers that are older than the table that is sealed."""
        for process in self._world.alive:
            for worker in process.living:
                is_old = worker.generation < g and process.node_of[worker.generation] in self.members
                self._require(not is_old, "overlap", f"{worker} runs while table {g} is sealed")

    def _charge(self, table: RankTable, before: RankTable, lost: list[str]) -> None:
        world, run = self._world, self.run
        charged = table.restarts - before.restarts
        self._require(charged in (0, 1), "budget", f"{charged} restarts charged at once")
        if not charged:
            return
        real = world.real_failures.get(before.generation)
        self._require(real, "charged", f"table {table.generation} is charged, but no worker of {before} failed")
        self._require(not lost, "charged", f"table {table.generation} is charged, but {lost} are lost")
        run.counted_s.append(world.now_s)
        window_s = run.terms.restart_window_s
        # Clocks differ by some percent.
        since_s = 0.0 if window_s is None else world.now_s - 0.9 * window_s
        spent = sum(at_s >= since_s for at_s in run.counted_s)
        self._require(spent <= run.terms.max_restarts, "budget", f"{spent} restarts of {run.terms.max_restarts}")

    def _end(self, outcome: Outcome) -> None:
        world, run = self._world, self.run
        world.log("store", f"ended: {outcome.kind.value}: {outcome.reason}")
        self._require(not run.ended, "ended", f"{outcome} after {run.ended}")
        if outcome.kind is OutcomeKind.INTERRUPTED:
            self._require(world.was_interrupted, "ended", "interrupted by no one")
            run.ended = outcome
            return
        self._by_leader(outcome)
        table = run.table
        if outcome.kind is OutcomeKind.SUCCEEDED:
            assert table
            assert self.generation
            self._require(table.generation == self.generation.number, "success", f"{outcome} in {self.generation}")
            for seat in table.seats:
                self._require(seat.node_id in self.done.get(table.generation, ()), "success", f"{seat} is not done")
                codes = [w.code for w in world.groups[table.generation].workers.values() if not w.is_alive]
                self._require(codes == [0] * table.world_size, "success", f"exit codes {codes}")
        else:
            self._failed(outcome, table)
        run.ended = outcome

    def _failed(self, outcome: Outcome, table: RankTable | None) -> None:
        """A job ends as failed only for a reason that its history has."""
        world, run = self._world, self.run
        self._require(outcome.kind is OutcomeKind.FAILED, "ended", f"{outcome}")
        if "raise --rdzv-conf join_timeout" in outcome.reason:
            joined = [self.members[n] for n in self.joined.get(outcome.generation, {}) if n in self.members]
            there = Counter(role_of_node(node.role, node.slots) for node in joined)
            is_short = len(joined) < run.terms.nodes_min or not there >= run.seats
            self._require(is_short, "ended", f"{outcome}, but {there} are here")
            # An agent may learn late of an earlier run's end.
            gone = [
                p.name
                for h in world.hosts
                for p in h.processes
                if p.succeeded_s >= run.began_s and p.outcome and p.outcome.generation >= run.first
            ]
            self._require(not gone, "deserted", f"{outcome}, but {gone} went as if all were well")
            return
        assert table
        assert self.generation
        self._require(table.generation < self.generation.number, "ended", f"{outcome} while {table} runs")
        self._require_stopped(self.generation.number)
        if outcome.code != 1 or self._final(table.generation):
            ended_by = [worker.code for worker in world.real_failures.get(table.generation, [])]
            self._require(outcome.code in run.terms.no_restart_codes, "code", f"{outcome} for {run.terms}")
            self._require(outcome.code in ended_by, "code", f"{outcome}, but workers ended with {ended_by}")
            return
        if run.terms.max_restarts == 0 or "made no progress" in outcome.reason:
            return
        real = world.real_failures.get(table.generation)
        self._require(real, "charged", f"{outcome}, but no worker of generation {table.generation} failed")
        if "budget" in outcome.reason and run.terms.restart_window_s is None:
            self._require(len(run.counted_s) == run.terms.max_restarts, "budget", f"{outcome}, {run.counted_s}")

    def _final(self, generation: int) -> list[Failure]:
        """The recorded failures after which the program wants no restart."""
        codes = self.run.terms.no_restart_codes
        return [f for f in self.failures.get(generation, {}).values() if f.code in codes and not f.kind.is_secondary]

    def _by_leader(self, what: object) -> None:
        assert self.writer
        owner = self._owners.get(self.leader)
        self._require(owner is self.writer[0], "leader", f"{self.writer[0].name} writes {what}; {self.leader} leads")

    def _put(self, parts: list[str], entry: KeyEntry) -> None:
        assert self.writer
        process, g = self.writer[0], self.generation.number if self.generation else -1
        match parts:
            case ["members", node_id]:
                node = decode(Node, entry.value)
                self._require(node.process == process.name, "stale", f"{process.name} writes {node}")
                self._owners[node_id] = process
                self.members[node_id] = node
                self.run.last_member_s = math.inf
                old = [w for w in process.living if w.generation < g]
                self._require(not old, "stale", f"{node_id} is a member of {g} while {old and old[0]} runs")
            case ["joined", number, node_id]:
                self._require(int(number) == g, "stale", f"{node_id} joins {number} in {g}")
                self._require(self._owners[node_id] is process, "stale", f"{process.name} joins as {node_id}")
                old = [w for p in process.host.processes for w in p.living if w.generation < g]
                self._require(not old, "overlap", f"{node_id} joins {g} while {old and old[0]} runs")
                self.joined.setdefault(g, {})[node_id] = decode(Joined, entry.value)
                self._have_joined.add((g, node_id))
            case ["failures", number, node_id]:
                self._require(self._owners[node_id] is process, "stale", f"{process.name} writes {parts}")
                self._require(int(number) <= g, "stale", f"{parts} in {g}")
                self.failures.setdefault(int(number), {})[node_id] = decode(Failure, entry.value)
            case ["done", number, node_id]:
                self._require(int(number) == g and not self.run.ended, "stale", f"{parts} in {g}")
                codes = [w.code for w in process.workers if w.generation == g]
                self._require(codes == [0] * process.host.plan.slots, "success", f"{node_id} done with codes {codes}")
                self.done.setdefault(g, set()).add(node_id)

    def _delete(self, parts: list[str], revision: int) -> None:
        match parts:
            case ["members", node_id]:
                self.members.pop(node_id, None)
                if not self.members:
                    self.run.last_member_s = self._world.now_s
                self._left[node_id] = revision
            case ["joined", number, node_id]:
                self.joined[int(number)].pop(node_id, None)
            case ["failures", number, node_id]:
                self.failures[int(number)].pop(node_id, None)
            case ["done", number, node_id]:
                self.done[int(number)].discard(node_id)
            case ["ctl", "table", number]:
                self.standing.pop(int(number))
            case ["ctl", "leader"]:
                self.leader = ""

    # The agents.

    def spawning(self, process: AgentProcess, table: RankTable, group_rank: int) -> None:
        g, me = table.generation, process.agent.me.node_id
        living = [w for p in process.host.processes for w in p.living]
        self._require(not living, "group", f"{process.name} starts generation {g} while {living and living[0]} runs")
        self._require(
            self.is_garbled or self.tables.get(g) == table,
            "one table",
            f"{process.name} starts {table}, sealed was another",
        )
        self._require(table.seats[group_rank].node_id == me, "seat", f"{process.name} starts {table} as {me}")
        self._require(g > max(process.node_of, default=-1), "group", f"{process.name} starts generation {g} again")

    def signalling(self, worker: Worker, signum: int) -> None:
        """A worker that listens is notified first. It gets a signal only after its time is over, or when it is done."""
        world, times, phase = self._world, self._world.plan.times, worker.process.agent.phase
        if not isinstance(phase, (Running, Stopping)) or worker.local_rank not in phase.status.to_failure:
            worker.was_signalled = True
        if worker.was_signalled or worker.has_saved or worker.has_raised or worker.process.signals.count(INT) > 1:
            return
        patience_s = times.boundary_wait_s
        if signum == KILL:
            # A signal to the agent, or the job's end, leaves the worker less time.
            patience_s = min(patience_s, times.stop_grace_s, times.failure_grace_s)
        limits = (worker.notified_s, patience_s), (worker.failed_s, times.failure_grace_s)
        # Clocks differ by some percent.
        over = [at_s + 0.9 * wait_s <= world.now_s for at_s, wait_s in limits if at_s is not None]
        self._require(any(over), "link", f"{worker}, which listens, gets signal {signum}: {worker!r}")

    def clearing(self, process: AgentProcess, generation: int) -> None:
        ordered = (process.name, generation)
        self._require(ordered not in self._cleared, "group", f"generation {generation} is cleared twice")
        self._cleared.add(ordered)

    def called(self, process: AgentProcess) -> None:
        """The agent sends a request to the store."""
        calls = process.busy("calls")
        self._require(calls <= CALLS_A_SECOND_MAX, "busy", f"{process.name} calls the store {calls} times a second")

    def stepped(self, process: AgentProcess, before: Agent, event: Event) -> None:
        """The agent has made a step and carried out its actions."""
        steps = process.busy("steps")
        self._require(steps <= STEPS_A_SECOND_MAX, "busy", f"{process.name} takes {steps} steps a second")
        agent, living = process.agent, process.living
        if isinstance(event, (WorkerExited, WorkerEnded, GroupFailed, Cleared)):
            is_old = event.generation < max(process.node_of, default=-1)
            # The text of an agent's whole state take longer than the check.
            text = f"{event} changed {before} into {agent}" if is_old and agent != before else ""
            self._require(not text, "stale", text)
        match agent.phase:
            case Running(table=table, live=live) | Stopping(table=table, live=live):
                ranks = {w.local_rank for w in living if w.generation == table.generation}
                self._require(ranks <= live, "group", f"{process.name} forgot {ranks - live} of {table.generation}")
                strangers = [w for w in living if w.generation != table.generation]
                self._require(not strangers, "group", f"{strangers} run beside {table.generation}")
            case Joining() | Clearing() | Finished() | Exited():
                self._require(not living, "group", f"{process.name} is {agent.phase} while {living} run")

    def heeded(self, process: AgentProcess, signum: int) -> None:
        """An agent that got a signal that long ago has ended, unless it is stopped or its loop hangs."""
        is_free = process.is_alive and not (process.is_stopped or process.is_wedged)
        self._require(not is_free or process.outcome, "signal", f"{process.name} did not heed signal {signum}")

    def exiting(self, process: AgentProcess, outcome: Outcome) -> None:
        """The agent's outcome must follow from its history."""
        world = self._world
        world.log(process.name, f"exits with {outcome.exit_code}")
        if self.is_garbled or world.is_history_lost:
            return
        # An agent that learns late of its run's end may see the next run begin before it exits. An agent that comes
        # later must not take an ended run for its own, if none of that run's members was left.
        ended = [run.ended for run in self.runs if run.last_member_s >= process.started_s]
        match outcome.kind:
            case OutcomeKind.SUCCEEDED:
                self._require(outcome in ended, "exit code", f"{outcome}, but {ended}")
            case OutcomeKind.FAILED if outcome not in ended:
                is_alone = world.plan.program is Program.UNSTARTABLE_HERE and "on this node" in outcome.reason
                self._require(is_alone, "exit code", f"{outcome}, but {ended}")
            case OutcomeKind.INTERRUPTED if outcome not in ended:
                self._require(outcome.signum in process.signals, "exit code", f"{outcome}: {process.signals}")
            case OutcomeKind.REFUSED:
                self._require(process.spec.terms != self.run.terms, "exit code", f"{outcome}")
            case OutcomeKind.UNKNOWN:
                is_long = process.line.down_s() > 0.9 * world.plan.times.store_timeout_s
                text = f"{outcome} after at most {process.line.down_s():.1f} s without the store"
                self._require(is_long, "exit code", text)

    def finished(self) -> None:
        """Every agent is gone, and all leases have ended."""
        if self.is_garbled or self._world.is_history_lost:
            return
        self._require(not self.members, "left behind", f"{list(self.members)}")
        self._require(not self.leader, "left behind", f"{self.leader} leads")
        for lease, process in self._begun_for_runs.items():
            is_left = lease not in self._stood_on and self._world.store.keep_alive(lease) > 0
            self._require(not (is_left and process.has_given_back), "unused lease", f"{process.name} left {lease}")


def is_leaders(txn: Txn) -> bool:
    """Whether only a leader, or a node that wants to lead, writes this transaction."""
    keys = [op.key for op in txn.then if isinstance(op, Put)]
    return KEYS.leader in keys or any(getattr(guard, "key", "") == KEYS.leader for guard in txn.guards)
