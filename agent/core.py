"""The agent's decisions: `step(agent, event, now_s) -> (agent, actions)`, without I/O.

States: JOINING, RUNNING, STOPPING, FINISHED, EXITED (rendezvous protocol). An event of another generation changes
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elaunch.agent.events import (
    Action,
    Clear,
    Cleared,
    Commit,
    Event,
    Exit,
    Join,
    Looked,
    ReplaceForkServer,
    Say,
    ServiceLost,
    Signalled,
    SignalWorkers,
    Spawn,
    Tick,
    WorkerExited,
    WorkerRaised,
)
from elaunch.agent.failures import with_tail
from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.forming import lead, open_job
from elaunch.rendezvous.snapshot import Snapshot
from elaunch.rendezvous.store import Txn
from elaunch.rendezvous.types import (
    Failure,
    Generation,
    JobSpec,
    Node,
    OpenKind,
    Outcome,
    OutcomeKind,
    RankTable,
)
from elaunch.rendezvous.verdict import verdict

_SIGINT, _SIGKILL, _SIGTERM = 2, 9, 15
# Schedulers signal the agent and its workers together; a worker that died so is no failure if our signal comes too.
HOLD_S = 0.1
# SIGKILL needs no consent: a worker that is not gone by then is one whose fork server no longer says so.
KILL_WAIT_S = 5.0
# After a stop's last worker, its output may take so long to be read by whoever reads it.
LAST_WORDS_S = 2.0


@dataclass(frozen=True)
class Joining:
    """No workers run; `asked` is the newest generation that this node has joined.

    `ran` is the newest that it has run. The store may be slow to tell that another was opened, and the old table, which
    still stands then, must not start workers again.
    """

    asked: int = -1
    ran: int = -1


@dataclass(frozen=True)
class Running:
    """The workers of `live` run; until `held_until_s`, the death `held` may turn out to be the scheduler's doing.

    `leaving_s` holds until when each worker whose program raised an exception may take its time to end.
    """

    table: RankTable
    live: frozenset[int]
    leaving_s: tuple[tuple[int, float], ...] = ()
    held: Failure | None = None
    held_until_s: float = 0.0


@dataclass(frozen=True)
class Stopping:
    """The workers of `live` are told to end, at the latest by SIGKILL at `kill_at_s`.

    `failure` is this node's first failure of the generation, `others` are those that came while it was stopping and
    were not its doing; `signum` is the signal that ends the job, or 0; `done` says that all workers exited with 0,
    `killed` that SIGKILL was sent.
    """

    table: RankTable
    live: frozenset[int]
    kill_at_s: float
    failure: Failure | None = None
    signum: int = 0
    signal_name: str = ""
    done: bool = False
    killed: bool = False
    others: tuple[Failure, ...] = ()


@dataclass(frozen=True)
class Finished:
    """All workers of this node exited with 0; it stays until the job has ended."""

    table: RankTable


@dataclass(frozen=True)
class Exited:
    """Nothing more to do."""

    outcome: Outcome


Phase = Joining | Running | Stopping | Finished | Exited


@dataclass(frozen=True)
class Agent:
    """One agent's whole state. `restart_times_s` are the restarts that it has seen, on its own monotonic clock."""

    me: Node
    spec: JobSpec
    stop_grace_s: float
    failure_grace_s: float
    snapshot: Snapshot
    phase: Phase = Joining()
    restart_times_s: tuple[float, ...] = ()


Step = tuple[Agent, tuple[Action, ...]]


def step(agent: Agent, event: Event, now_s: float) -> Step:
    """What the agent becomes and does when `event` happens at `now_s` (monotonic)."""
    match event:
        case Looked(snapshot):
            return _look(replace(agent, snapshot=snapshot), now_s)
        case WorkerExited():
            return _worker_exited(agent, event, now_s)
        case WorkerRaised():
            return _worker_raised(agent, event, now_s), ()
        case ServiceLost():
            return _service_lost(agent, event, now_s)
        case Signalled():
            return _signalled(agent, event, now_s)
        case Cleared():
            return _cleared(agent, event, now_s)
        case Tick():
            return _tick(agent, now_s)


def deadline_s(agent: Agent) -> float | None:
    """When the agent wants its next `Tick`, or None."""
    match agent.phase:
        case Running(held=held, held_until_s=until_s, leaving_s=leaving_s) if held or leaving_s:
            return min([*([until_s] if held else []), *(until_s for _, until_s in leaving_s)])
        case Stopping(live=live, kill_at_s=kill_at_s, signum=signum) if live or signum:
            return kill_at_s
        case _:
            return None


def _look(agent: Agent, now_s: float) -> Step:
    snapshot, phase = agent.snapshot, agent.phase
    if snapshot.generation is None:
        return agent, (Commit(open_job(snapshot, agent.spec, agent.me)),)
    if snapshot.ended and isinstance(phase, (Joining, Finished)):
        return _exit(agent, snapshot.ended)
    led = lead(snapshot, agent.me, agent.restart_times_s, now_s)
    actions: tuple[Action, ...] = (Commit(led),) if led else ()
    newest = snapshot.generation.number
    match phase:
        case Joining(asked, ran) if newest > ran:
            table = snapshot.table
            if table and table.generation == newest and (seat := table.group_rank(agent.me.node_id)) is not None:
                return _spawn(agent, table, seat, now_s, actions)
            if asked < newest:
                return replace(agent, phase=Joining(newest, ran)), (*actions, Join(newest))
        case Running(table=table, live=live) if newest > table.generation:
            stopping = Stopping(table, live, now_s + agent.failure_grace_s)
            return _stop(agent, stopping, _SIGTERM, (*actions, Say(f"stopping: {snapshot.generation.cause}")))
        case Finished(table) if newest > table.generation:
            agent, more = _look(replace(agent, phase=Joining(ran=table.generation)), now_s)
            return agent, (*actions, *more)
    return agent, actions


def _spawn(agent: Agent, table: RankTable, group_rank: int, now_s: float, actions: tuple[Action, ...]) -> Step:
    slots = table.seats[group_rank].slots
    times_s = (*agent.restart_times_s, now_s) if table.generation else ()
    agent = replace(agent, phase=Running(table, frozenset(range(slots))), restart_times_s=times_s)
    workers = "1 worker" if table.world_size == 1 else f"{table.world_size} workers"
    nodes = "" if len(table.seats) == 1 else f" on {len(table.seats)} nodes"
    started = Say(f"generation {table.generation}: {workers}{nodes} ({table.reason})")
    return agent, (*actions, started, Spawn(table, group_rank))


def _worker_exited(agent: Agent, event: WorkerExited, now_s: float) -> Step:
    match agent.phase:
        case Running(table=table, live=live, held=held) as running if table.generation == event.generation:
            left = live - {event.local_rank}
            if event.failure is None:
                if left or held:
                    return replace(agent, phase=_without(running, event.local_rank)), ()
                return _stop(agent, Stopping(table, left, now_s, done=True), 0, ())
            if event.code in (-_SIGTERM, -_SIGINT):
                kept = replace(_without(running, event.local_rank), held=held or event.failure)
                return replace(agent, phase=kept if held else replace(kept, held_until_s=now_s + HOLD_S)), ()
            return _fail(agent, table, left, held or event.failure, now_s)
        case Stopping(table=table, live=live) as stopping if table.generation == event.generation:
            if event.local_rank not in live:
                return agent, ()
            stopping = replace(stopping, live=live - {event.local_rank})
            if stopping.signum and not stopping.live:
                stopping = replace(stopping, kill_at_s=min(stopping.kill_at_s, now_s + LAST_WORDS_S))
            if event.failure and stopping.failure and not _by_us(event, stopping):
                stopping = replace(stopping, others=(*stopping.others, event.failure))
            return _stop(agent, stopping, 0, ())
    return agent, ()


def _without(running: Running, local_rank: int) -> Running:
    leaving_s = tuple((rank, until_s) for rank, until_s in running.leaving_s if rank != local_rank)
    return replace(running, live=running.live - {local_rank}, leaving_s=leaving_s)


def _worker_raised(agent: Agent, event: WorkerRaised, now_s: float) -> Agent:
    match agent.phase:
        case Running(table=table, live=live) as running if table.generation == event.generation:
            if event.local_rank in live:
                leaving = (event.local_rank, now_s + agent.stop_grace_s)
                return replace(agent, phase=replace(running, leaving_s=(*running.leaving_s, leaving)))
    return agent


def _by_us(event: WorkerExited, stopping: Stopping) -> bool:
    """Whether a worker that ended while we were stopping ended of the signal that it got."""
    return event.code in (-_SIGTERM, 128 + _SIGTERM) or (event.code == -_SIGKILL and stopping.killed)


def _service_lost(agent: Agent, event: ServiceLost, now_s: float) -> Step:
    match agent.phase:
        case Running(table=table, live=live, held=held) if table.generation == event.generation:
            left: frozenset[int] = frozenset() if event.workers_too else live
            return _fail(agent, table, left, held or event.failure, now_s)
        case Stopping(table=table) as stopping if table.generation == event.generation and event.workers_too:
            return _stop(agent, replace(stopping, live=frozenset()), 0, ()) if stopping.live else (agent, ())
    return agent, ()


def _fail(agent: Agent, table: RankTable, live: frozenset[int], failure: Failure, now_s: float) -> Step:
    """Open the next generation together with the failure that is its cause, then stop the others."""
    keys = agent.snapshot.keys
    opened = Generation(table.generation + 1, OpenKind.FAIL, failure.sentence)
    record = {keys.failure(table.generation, agent.me.node_id): encode(failure)}
    guards = (agent.snapshot.gen_guard, agent.snapshot.live_guard)
    others = f"; stopping {len(live)} other{'s' if len(live) > 1 else ''}" if live else ""
    actions = (Commit(Txn(guards, {keys.generation: encode(opened), **record})), Say(failure.sentence + others))
    return _stop(agent, Stopping(table, live, now_s + agent.failure_grace_s, failure), _SIGTERM, actions)


def _signalled(agent: Agent, event: Signalled, now_s: float) -> Step:
    match agent.phase:
        case Running(table=table, live=live):
            stopping = Stopping(table, live, now_s + agent.stop_grace_s, None, event.signum, event.name)
            workers = "1 worker" if len(live) == 1 else f"{len(live)} workers"
            again = "; Ctrl-C again kills now" if event.signum == _SIGINT else ""
            text = f"{event.name}: stopping {workers}, SIGKILL in {agent.stop_grace_s:g} s{again}"
            return _stop(agent, stopping, event.signum, (Say(text),))
        case Stopping(signum=0, done=False, live=live) as stopping:
            stopping = replace(stopping, signum=event.signum, signal_name=event.name)
            if not live:
                return replace(agent, phase=replace(stopping, kill_at_s=now_s + LAST_WORDS_S)), ()
            return _stop(agent, stopping, event.signum, ())
        case Stopping(killed=False, live=live) as stopping if event.signum == _SIGINT and live:
            return _kill(agent, stopping, now_s, Say("SIGINT again: killing the workers now"))
        case Stopping(live=live, signum=signum, signal_name=name) if event.signum == _SIGINT and signum and not live:
            # Only output is left, and whoever reads it does not.
            return _exit(agent, _interrupted(agent, signum, name))
        case Joining() | Finished():
            return _exit(agent, _interrupted(agent, event.signum, event.name))
    return agent, ()


def _tick(agent: Agent, now_s: float) -> Step:
    match agent.phase:
        case Running(table=table, live=live, held=Failure() as failure, held_until_s=until_s) if now_s >= until_s:
            return _fail(agent, table, live, failure, now_s)
        case Running(table=table, leaving_s=leaving_s) as running:
            late = frozenset(rank for rank, until_s in leaving_s if now_s >= until_s)
            if not late:
                return agent, ()
            # Seen with torch: the last reference to a process group waits for a thread that waits for the GIL.
            rest = tuple((rank, until_s) for rank, until_s in leaving_s if rank not in late)
            ranks = ", ".join(str(rank) for rank in sorted(late))
            text = f"local rank {ranks} raised an exception and did not end within {agent.stop_grace_s:g} s; SIGKILL"
            actions = (Say(text), SignalWorkers(table.generation, late, _SIGKILL))
            return replace(agent, phase=replace(running, leaving_s=rest)), actions
        case Stopping(live=live, kill_at_s=kill_at_s, signum=signum, signal_name=name) if (
            signum and not live and now_s >= kill_at_s
        ):
            # Only output is left, and whoever reads it does not.
            return _exit(agent, _interrupted(agent, signum, name))
        case Stopping(live=live, kill_at_s=kill_at_s) as stopping if live and now_s >= kill_at_s:
            ranks = ", ".join(str(rank) for rank in sorted(live))
            if stopping.killed:
                return replace(agent, phase=replace(stopping, kill_at_s=now_s + KILL_WAIT_S)), (
                    Say(f"local rank {ranks} did not end {KILL_WAIT_S:g} s after SIGKILL; replacing the fork server"),
                    ReplaceForkServer(stopping.table.generation),
                )
            grace_s = agent.stop_grace_s if stopping.signum and not stopping.failure else agent.failure_grace_s
            return _kill(agent, stopping, now_s, Say(f"local rank {ranks} still ran after {grace_s:g} s; SIGKILL"))
    return agent, ()


def _kill(agent: Agent, stopping: Stopping, now_s: float, said: Say) -> Step:
    stopping = replace(stopping, killed=True, kill_at_s=now_s + KILL_WAIT_S)
    return _stop(agent, stopping, _SIGKILL, (said,))


def _stop(agent: Agent, stopping: Stopping, signum: int, actions: tuple[Action, ...]) -> Step:
    """Go on stopping: signal whoever lives, or clear up after the last one."""
    agent = replace(agent, phase=stopping)
    generation = stopping.table.generation
    if not stopping.live:
        return agent, (*actions, Clear(generation))
    if signum:
        return agent, (*actions, SignalWorkers(generation, stopping.live, signum))
    return agent, actions


def _cleared(agent: Agent, event: Cleared, now_s: float) -> Step:
    if not isinstance(agent.phase, Stopping) or agent.phase.table.generation != event.generation:
        return agent, ()
    stopping, keys = agent.phase, agent.snapshot.keys
    actions: tuple[Action, ...] = ()
    if stopping.failure:
        # Whether an exit was only a word about a lost peer may show in the output, which is here now.
        failures = (stopping.failure, *stopping.others)
        whole = verdict([with_tail(f, event.tails.get(f.local_rank, ""), event.reached_store) for f in failures])
        record = {keys.failure(event.generation, agent.me.node_id): encode(whole)}
        actions = (Commit(Txn((agent.snapshot.live_guard,), record)),)
        if whole.local_rank != stopping.failure.local_rank:
            # A worker that dies while it writes to a disk is gone later than its peers notice and give up.
            actions = (*actions, Say(f"the cause: {whole.sentence}"))
    if stopping.signum:
        agent, more = _exit(agent, _interrupted(agent, stopping.signum, stopping.signal_name))
        return agent, (*actions, *more)
    if agent.snapshot.ended:
        agent, more = _exit(agent, agent.snapshot.ended)
        return agent, (*actions, *more)
    if stopping.done:
        txn = Txn(
            (agent.snapshot.gen_guard, agent.snapshot.live_guard),
            {keys.done(event.generation, agent.me.node_id): ""},
        )
        return replace(agent, phase=Finished(stopping.table)), (*actions, Commit(txn))
    agent, more = _look(replace(agent, phase=Joining(ran=stopping.table.generation)), now_s)
    return agent, (*actions, *more)


def _interrupted(agent: Agent, signum: int, name: str) -> Outcome:
    table = agent.snapshot.table
    return Outcome(
        OutcomeKind.INTERRUPTED,
        f"{name} was received",
        table.generation if table else 0,
        table.restarts if table else 0,
        agent.spec.max_restarts,
        signum=signum,
    )


def _exit(agent: Agent, outcome: Outcome) -> Step:
    return replace(agent, phase=Exited(outcome)), (Exit(outcome),)
