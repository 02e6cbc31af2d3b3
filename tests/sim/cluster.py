"""Whole clusters in virtual time: many agents, one store, and everything that can go wrong between them.

The decisions are the product's own, and so is the client of the store. Threads, processes, networks and clocks are
simulated. A seed is one world: `simulate(draw(seed))` runs it, checks every write and every step, and raises
`Violation` with the world and its history. `python -m tests.sim.cluster SEED` runs one seed with its whole history.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections.abc import Callable
from dataclasses import replace

from elaunch.agent.core.actions import Clear, Commit, Join, NotifyWorkers, SignalWorkers, Spawn
from elaunch.agent.core.events import Cleared, GroupFailed, SnapshotChanged, WorkerExited
from elaunch.agent.core.membership import order
from elaunch.rendezvous.engine import MemoryStore
from elaunch.rendezvous.rules.queries import Topic
from elaunch.rendezvous.store import Delete, Put, Txn, TxnResponse
from elaunch.rendezvous.types import FailureKind, JobSpec, Program, ProgramKind, RankTable
from tests.sim.agents import KEYS, AgentProcess, Host
from tests.sim.checks import Checks, Violation, is_leaders
from tests.sim.groups import INT, TERM, USR1, Group, Worker
from tests.sim.plans import FOREVER_S, Fault, Plan, Strike, draw

HISTORY_SHOWN = 600
# The most time from the last fault to the last agent's end.
LIFE_AFTER_S = 260.0
# The most time to obey a signal: for stopping, killing, the slowest clearing up, and a loop that stood still meanwhile.
HEEDED_S = 70.0


class World:
    """One cluster and its life. Violations of the rules in `ignored` are not raised."""

    def __init__(self, plan: Plan, ignored: tuple[str, ...] = ()) -> None:
        self.plan = plan
        self.ignored = ignored
        self.rng = random.Random(plan.seed)
        # The signal by which the scheduler takes nodes away.
        self.notice = USR1 if plan.seed % 3 == 1 else TERM
        self.now_s = 0.0
        self.store = MemoryStore()
        self.history: list[tuple[float, str, object]] = []
        self.is_verbose = False
        self.is_rough = True
        self.is_pumping = False
        self.is_store_away = False
        self.is_store_full = False
        self.is_history_lost = False
        self.was_interrupted = False
        self.trained_s = 0.0
        self.real_failures: dict[int, list[Worker]] = {}
        self.groups: dict[int, Group] = {}
        self.struck: list[Strike] = []
        self.wiped: list[str] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._store_frozen_s = 0.0
        self._store_away_since_s: float | None = None
        self._leader_kills: list[tuple[int, bool]] = []
        self._times_again = 1 if plan.again else 0
        self._limit_s = plan.heal_s + max(host.start_s for host in plan.hosts) + LIFE_AFTER_S
        self.checks = Checks(self)
        self.hosts = [Host(self, host) for host in plan.hosts]

    # Time.

    def later(self, in_s: float, what: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self.now_s + in_s, self._order, what))

    def pump_for(self, for_s: float) -> None:
        """Let all others act for this long."""
        was_pumping, self.is_pumping = self.is_pumping, True
        until_s = self.now_s + for_s
        while self._heap and self._heap[0][0] <= until_s:
            self._next()
        self.now_s = max(self.now_s, until_s)
        self.is_pumping = was_pumping

    def _next(self) -> None:
        at_s, _, what = heapq.heappop(self._heap)
        self.now_s = max(self.now_s, at_s)
        self.advance_store()
        what()

    def live(self) -> None:
        """Run from the first agent's start to the last one's end."""
        self._plan_all()
        self._live_on()
        self.now_s += self.plan.times.lease_ttl_s + 5.0
        self.advance_store()
        self.checks.finished()

    def _live_on(self) -> None:
        while self._heap:
            self._next()
            if self._times_again and self.checks.runs and not self.alive:
                self._start_again()
            if self.now_s > self._limit_s:
                phases = {p.name: p.agent.phase for p in self.alive if not p.is_lost}
                if phases:
                    raise Violation("liveness", f"at {self.now_s:.0f} s there are still {phases}")
                break
        for process in self.alive:
            # An agent whose loop never goes on cannot end by itself.
            assert process.is_lost, f"nothing will ever happen any more, and {process.name} is alive"
            process.kill()
        self._heap.clear()

    def _start_again(self) -> None:
        """The user types the same command once more: the job's id is used again."""
        if self.now_s <= max(host.start_s for host in self.plan.hosts) or self.checks.is_garbled:
            return
        self._times_again -= 1
        self.log("world", "the job's id is used again")
        self._limit_s = max(self._limit_s, self.now_s + LIFE_AFTER_S)
        for host in self.hosts:
            self.later(self.rng.choice([0.0, self.rng.uniform(0, 5)]), host.start)

    # The job.

    def spec(self, *, wrong: bool) -> JobSpec:
        plan = self.plan
        program = Program(ProgramKind.SCRIPT, "train.py")
        spec = JobSpec(
            KEYS.run_id,
            program,
            plan.nodes_min,
            plan.nodes_max,
            plan.max_restarts,
            plan.restart_window_s,
            plan.exclude_after,
            plan.no_restart_codes,
        )
        return replace(spec, program=replace(program, args=("--other",))) if wrong else spec

    @property
    def alive(self) -> list[AgentProcess]:
        return [process for host in self.hosts for process in host.processes if process.is_alive]

    def group_of(self, table: RankTable) -> Group:
        return self.groups.setdefault(table.generation, Group(self, table))

    def note_failure(self, worker: Worker) -> None:
        self.log("world", f"{worker} fails of its own")
        self.real_failures.setdefault(worker.generation, []).append(worker)

    def run_started(self) -> None:
        self.trained_s = 0.0

    def died(self, process: AgentProcess) -> None:
        again_s = process.host.plan.again_s
        if process.outcome is None and again_s is not None and self.is_rough:
            self.later(again_s, process.host.start)

    # How slow things are at the moment.

    @property
    def call_s(self) -> float:
        return self.plan.call_s if self.is_rough else min(self.plan.call_s, 0.01)

    @property
    def watch_s(self) -> float:
        return self.plan.watch_s if self.is_rough else min(self.plan.watch_s, 0.01)

    @property
    def loop_s(self) -> float:
        return self.plan.loop_s if self.is_rough else min(self.plan.loop_s, 0.01)

    # The store.

    def advance_store(self) -> None:
        """Advance the store's own clock, on which leases end. It stands still while the store is unreachable."""
        if self._store_away_since_s is None:
            self.store.advance(max(0.0, self.now_s - self._store_frozen_s - self.plan.lease_slack_s))

    def commit(self, process: AgentProcess, txn: Txn) -> TxnResponse:
        """A transaction that has reached the store."""
        is_fatal = self._strikes_leader(txn)
        if is_fatal is False:
            process.kill()
            return TxnResponse(False, 0)
        outer, self.checks.writer = self.checks.writer, (process, txn)
        try:
            answer = self.store.commit(txn)
        finally:
            self.checks.writer = outer
        if is_fatal:
            process.kill()
        return answer

    def revoke(self, process: AgentProcess, lease: int) -> None:
        self.store.revoke(lease)

    def _strikes_leader(self, txn: Txn) -> bool | None:
        """Whether the sender is killed at this leader's write: True after it, False before it, None not at all."""
        if not self._leader_kills or not is_leaders(txn):
            return None
        number, is_after = self._leader_kills[0]
        if number > 1:
            self._leader_kills[0] = (number - 1, is_after)
            return None
        self._leader_kills.pop(0)
        self.struck.append(Strike.KILL_LEADER)
        return is_after

    # Faults.

    def _plan_all(self) -> None:
        for host in self.hosts:
            self.later(host.plan.start_s, host.start)
        for fault in self.plan.faults:
            self.later(fault.at_s, lambda fault=fault: self._strike(fault))
        self.later(self.plan.heal_s, self._heal)

    def _strike(self, fault: Fault) -> None:
        self.log("world", fault)
        host = self.hosts[fault.host % len(self.hosts)]
        match fault.what:
            case Strike.AWAY | Strike.AWAY_ENDING:
                self._take_store_away(fault)
            case Strike.CUT | Strike.STORELESS:
                self._for_a_while(self._set_cut, host, fault)
            case Strike.FULL | Strike.REFUSED:
                self._for_a_while(self._set_refused, host, fault)
            case Strike.KILL_LEADER:
                self._leader_kills.append((fault.number, self.rng.random() < 0.5))
                return
            case Strike.HISTORY:
                self.is_history_lost = True
            case Strike.GARBAGE:
                self._garble(fault)
            case Strike.POWER:
                self._power_off(host, fault)
            case Strike.SICK:
                host.is_sick = True
                self.later(fault.lasts_s, host.recover)
                for worker in host.process.living if host.process else ():
                    self.groups[worker.generation].sicken(worker)
            case Strike.SLOW_CLEAR:
                host.slow_clears.append(fault.lasts_s)
            case Strike.CANCEL:
                for process in self.alive:
                    self._preempt(process)
            case _ if host.process:
                if not self._strike_process(host.process, fault):
                    return
            case _:
                return
        self.struck.append(fault.what)

    def _strike_process(self, process: AgentProcess, fault: Fault) -> bool:
        living = process.living
        match fault.what:
            case Strike.KILL:
                process.kill()
            case Strike.KILL_AT:
                process.kill_at_action = process.actions + fault.number
            case Strike.STOP | Strike.WEDGE:
                process.stop(loop_only=fault.what is Strike.WEDGE)
                process.is_lost = fault.lasts_s >= FOREVER_S
                if not process.is_lost:
                    self.later(fault.lasts_s, process.go_on)
            case Strike.DEAF:
                process.line.deafen()
            case Strike.LEAVE:
                self._signal(process, self.notice)
            case Strike.INTERRUPT:
                self.was_interrupted = True
                self._signal(process, INT)
            case Strike.RESTART:
                event, _ = order(process.agent, Topic.RESTART)
                if event is None:
                    return False
                process.receive(event)
            case Strike.PREEMPT:
                self._preempt(process)
            case Strike.HANG if living:
                self.groups[living[0].generation].hang()
            case Strike.WORKER if living:
                worker = self.rng.choice(living)
                code, kind = self.rng.choice(
                    [(1, None), (3, None), (-9, None), (-11, None), (-15, None), (1, FailureKind.OUT_OF_MEMORY)]
                )
                self.groups[worker.generation].end(worker, code, kind, is_own=True)
            case Strike.SERVICE | Strike.FORK_SERVER if living:
                is_store = fault.what is Strike.SERVICE
                kind = FailureKind.STORE_LOST if is_store else FailureKind.TEMPLATE_LOST
                process.lose_service(living[0].generation, kind, is_own=True)
            case _:
                return False
        return True

    def _signal(self, process: AgentProcess, signum: int) -> None:
        process.signal(signum)
        self.later(HEEDED_S, lambda: self.checks.heeded(process, signum))

    def _preempt(self, process: AgentProcess) -> None:
        """The scheduler signals agent and workers, in any order."""
        self.later(self.rng.uniform(0, 0.08), lambda: self._signal(process, self.notice))
        for worker in process.living:
            group = self.groups[worker.generation]
            self.later(self.rng.uniform(0, 0.08), lambda w=worker, g=group: g.signal(w, self.notice, by_agent=False))

    def _take_store_away(self, fault: Fault) -> None:
        if self.is_store_away:
            return
        self.is_store_away = True
        if fault.what is Strike.AWAY:
            self._store_away_since_s = self.now_s
        self._lines_changed()
        self.later(fault.lasts_s, self._bring_store_back)

    def _bring_store_back(self) -> None:
        if self._store_away_since_s is not None:
            self._store_frozen_s += self.now_s - self._store_away_since_s
            self._store_away_since_s = None
        self.is_store_away = False
        self._lines_changed()

    def _for_a_while(self, change: Callable[[Host, Strike, bool], None], host: Host, fault: Fault) -> None:
        change(host, fault.what, True)
        self.later(fault.lasts_s, lambda: change(host, fault.what, False))

    def _set_refused(self, host: Host, what: Strike, is_refused: bool) -> None:
        if what is Strike.FULL:
            self.is_store_full = is_refused
        else:
            host.is_refused = is_refused
        for process in self.alive:
            process.line.note()

    def _set_cut(self, host: Host, what: Strike, is_cut: bool) -> None:
        if what is Strike.CUT:
            host.is_cut = is_cut
        else:
            host.is_storeless = is_cut
        self._lines_changed()
        for group in list(self.groups.values()):
            group.review()

    def _lines_changed(self) -> None:
        for process in self.alive:
            process.line.resume()

    def _power_off(self, host: Host, fault: Fault) -> None:
        host.is_off = True
        if host.process:
            host.process.kill()
        self.later(fault.lasts_s, lambda: self._power_on(host))

    def _power_on(self, host: Host) -> None:
        if host.is_off:
            host.is_off = False
            if host.plan.again_s is not None:
                self.later(host.plan.again_s, host.start)

    def _garble(self, fault: Fault) -> None:
        self.checks.is_garbled = True
        number = self.checks.generation.number if self.checks.generation else 0
        keys = [KEYS.member("x-1"), KEYS.joined(number, "x-1"), KEYS.spec, KEYS.ended, KEYS.table(number + 1)]
        self.store.commit(Txn((), (Put(keys[fault.number % len(keys)], '{"seats'),)))

    def _heal(self) -> None:
        self.log("world", "heals")
        self.is_rough = False
        self._leader_kills.clear()
        for host in self.hosts:
            host.is_cut = host.is_storeless = host.is_sick = False
            host.slow_clears.clear()
            self._power_on(host)
        self._bring_store_back()
        for process in self.alive:
            process.kill_at_action = None
            if not process.is_lost:
                process.go_on()
        for group in list(self.groups.values()):
            group.review()

    # History.

    def log(self, who: str, what: object) -> None:
        self.history.append((self.now_s, who, what))

    def story(self, lines_max: int = HISTORY_SHOWN) -> str:
        return "\n".join(f"{at_s:9.3f} {who:10} {short(what)}" for at_s, who, what in self.history[-lines_max:])


def short(what: object) -> str:
    """One line of history."""
    match what:
        case SnapshotChanged(s):
            number = s.generation.number if s.generation else None
            table = s.table.generation if s.table else None
            ended = f" ended {s.ended.kind.value}" if s.ended else ""
            whole = f" members {list(s.members)}" if s.whole else ""
            return f"snapshot {s.revision}: generation {number} table {table} leader {s.leader}{ended}{whole}"
        case Commit(txn, tag):
            return f"  -> commit {tag.value if tag else ''} {_ops(txn)}"
        case WorkerExited(generation, local_rank, code, failure):
            return f"worker {local_rank} of {generation} exited {code} {failure.kind.value if failure else ''}"
        case GroupFailed(generation, failure, _):
            return f"{failure.kind.value} in {generation}"
        case Spawn(table, _):
            return f"  -> spawn {table.generation}"
        case Cleared(generation):
            return f"cleared {generation}"
        case Clear() | Join() | SignalWorkers() | NotifyWorkers():
            return f"  -> {what}"
        case _:
            return str(what)


def _ops(txn: Txn) -> str:
    parts = [f"{'+' if isinstance(op, Put) else '-'}{op.key.removeprefix(KEYS.root)}" for op in txn.then]
    kept = [op for op in txn.then if isinstance(op, Delete)]
    return " ".join(parts[:6]) + (" …" if len(parts) > 6 else "") + (f" ({len(kept)} deletes)" if len(kept) > 3 else "")


def simulate(plan: Plan, ignored: tuple[str, ...] = ()) -> World:
    """Run one world. Raises Violation with the seed, the world and its history."""
    world = World(plan, ignored)
    try:
        world.live()
    except Violation as violation:
        text = f"seed {plan.seed}: {violation}\n{plan}\n{world.story()}"
        raise Violation(violation.rule, text) from violation
    except Exception as error:
        raise AssertionError(f"seed {plan.seed}: {error!r}\n{plan}\n{world.story()}") from error
    return world


if __name__ == "__main__":
    HISTORY_SHOWN = 1_000_000
    for seed in map(int, sys.argv[1:]):
        lived = World(draw(seed))
        lived.is_verbose = True
        try:
            lived.live()
        finally:
            print(lived.plan)
            print(lived.story(HISTORY_SHOWN))
