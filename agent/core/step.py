"""The agent's decisions: `step(agent, event, now_s) -> (agent, actions)`, without I/O, by one row for each event.

`python -m elaunch.agent.core.step` prints the page docs/phases.md, which shows the table in words.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, get_args

from elaunch.agent.core import clearing, joining, leaving, membership, running, stopping, store_outage
from elaunch.agent.core import store_outage as outage
from elaunch.agent.core.actions import Say
from elaunch.agent.core.events import (
    Cleared,
    Committed,
    Event,
    Leased,
    LeaseLost,
    Looked,
    OwnStoreLost,
    Reported,
    RestartOrdered,
    Sampled,
    ServiceLost,
    Signalled,
    StacksTaken,
    StoreAway,
    StoreBack,
    StoreEvent,
    StoreLost,
    StoreRefuses,
    Tick,
    WatchRefused,
    WorkerAsked,
    WorkerEvent,
    WorkerExited,
    WorkerListens,
    WorkerRaised,
    WorkerReturned,
    WorkerSaved,
    WorkerSaving,
    WorkersHung,
    WorkerStopped,
)
from elaunch.agent.core.membership import attend
from elaunch.agent.core.state import Agent, Clearing, Exited, Finished, Joining, Mode, Phase, Running, Step, Stopping
from elaunch.agent.core.store_outage import gives_up_at_s

P = TypeVar("P")
E = TypeVar("E")
Handler = Callable[[Agent, P, E, float], Step]


@dataclass(frozen=True)
class Ignored:
    """A cell in which nothing is done, and why."""

    reason: str

    def __call__(self, agent: Agent, _phase: object, _event: object, _now_s: float) -> Step:
        return agent, ()


NO_WORKERS = Ignored("no worker of this node runs")
ALL_DONE = Ignored("all workers of this node have exited with 0")
NONE_LEFT = Ignored("the last worker is gone")
OVER = Ignored("this agent's work is done")
ASKED_TO = Ignored("its signal may be the reason")
UNBROKEN = Ignored("no peer has failed, so this worker is still needed")
HAS_GRACE = Ignored("the stop's own deadline covers this worker")
FORMING = Ignored("another generation is about to start, or the job ends")
NOT_AWAITED = Ignored("workers that are to end need not report")
KILLED_IN_TIME = Ignored("a worker that hangs gets SIGKILL at the stop's deadline")
NOTHING_TO_CLEAR = Ignored("not possible: it answers `Clear`, and nothing is being cleared")
STILL_LIVE = Ignored("not possible: it answers `Clear`, which comes after the last worker's end")


@dataclass(frozen=True)
class Row(Generic[E]):
    """What one kind of event means in each phase."""

    event: type[E]
    joining: Handler[Joining, E]
    running: Handler[Running, E]
    stopping: Handler[Stopping, E]
    clearing: Handler[Clearing, E]
    finished: Handler[Finished, E]
    exited: Handler[Exited, E] = OVER


def _alike(event: type[E], handler: Handler[Any, E]) -> Row[E]:
    """An event that means the same in every phase."""
    return Row(event, handler, handler, handler, handler, handler)


# fmt: off
# Each row: the event; then joining, running, stopping, clearing, finished.
ROWS: tuple[Row[Any], ...] = (
    Row(Looked, joining.looked, running.looked, stopping.looked, clearing.looked, clearing.finished_looked),
    _alike(Committed, membership.committed),
    Row(Leased, joining.begin_with_lease, membership.leased, membership.leased, membership.leased, membership.leased),
    Row(LeaseLost, joining.lose_lease,
        membership.lease_lost, membership.lease_lost, membership.lease_lost, membership.lease_lost),
    _alike(StoreAway, outage.store_failed),
    Row(StoreRefuses, joining.store_refuses,
        outage.store_failed, outage.store_failed, outage.store_failed, outage.store_failed),
    _alike(WatchRefused, outage.watch_refused),
    _alike(StoreBack, outage.store_back),
    Row(StoreLost,
        joining.store_lost, running.store_lost, stopping.store_lost, clearing.store_lost, clearing.finished_store_lost),
    Row(OwnStoreLost, store_outage.lost_without_workers, store_outage.lost_with_workers, store_outage.lost_with_workers,
        store_outage.lost_with_workers, store_outage.lost_without_workers),
    Row(WorkerExited, NO_WORKERS, running.worker_exited, stopping.worker_exited, NONE_LEFT, ALL_DONE),
    Row(WorkerRaised, NO_WORKERS, running.worker_raised, HAS_GRACE, NONE_LEFT, ALL_DONE),
    Row(WorkerReturned, NO_WORKERS, running.worker_returned, ASKED_TO, NONE_LEFT, ALL_DONE),
    Row(WorkerListens, NO_WORKERS, running.worker_listens, stopping.worker_listens, NONE_LEFT, ALL_DONE),
    Row(WorkerSaving, NO_WORKERS, running.worker_saving, stopping.worker_saving, NONE_LEFT, ALL_DONE),
    Row(WorkerSaved, NO_WORKERS, UNBROKEN, stopping.worker_saved, NONE_LEFT, ALL_DONE),
    Row(WorkerStopped, NO_WORKERS, running.worker_stopped, stopping.worker_stopped, NONE_LEFT, ALL_DONE),
    Row(Reported, NO_WORKERS, running.reported, NOT_AWAITED, NONE_LEFT, ALL_DONE),
    Row(Sampled, NO_WORKERS, running.sampled, NOT_AWAITED, NONE_LEFT, ALL_DONE),
    Row(StacksTaken, NO_WORKERS, running.stacks_taken, NOT_AWAITED, NONE_LEFT, ALL_DONE),
    Row(WorkersHung, NO_WORKERS, running.workers_hung, KILLED_IN_TIME, NONE_LEFT, ALL_DONE),
    Row(WorkerAsked, NO_WORKERS, running.worker_asked, stopping.worker_asked, NONE_LEFT, ALL_DONE),
    Row(ServiceLost, NO_WORKERS, running.service_lost, stopping.service_lost, NONE_LEFT, ALL_DONE),
    Row(Cleared, NOTHING_TO_CLEAR, STILL_LIVE, STILL_LIVE, clearing.cleared, NOTHING_TO_CLEAR),
    Row(Signalled,
        leaving.signalled, running.signalled, stopping.signalled, clearing.signalled, leaving.signalled),
    Row(RestartOrdered, leaving.restart, leaving.restart, FORMING, FORMING, leaving.restart),
    Row(Tick, outage.tick, running.tick, stopping.tick, clearing.tick, outage.tick),
)
# fmt: on
TABLE: Mapping[type[Phase], Mapping[type[Event], Handler[Any, Any]]] = {
    Joining: {row.event: row.joining for row in ROWS},
    Running: {row.event: row.running for row in ROWS},
    Stopping: {row.event: row.stopping for row in ROWS},
    Clearing: {row.event: row.clearing for row in ROWS},
    Finished: {row.event: row.finished for row in ROWS},
    Exited: {row.event: row.exited for row in ROWS},
}

_PAGE_HEAD = """\
# What an agent does: phases and events

<!-- Made by `python -m elaunch.agent.core.step > docs/phases.md`. -->

An agent is a state machine. Everything that happens to it is an event. This page says what it does with each event in
each phase. The page is made from the table by which the program itself decides, `agent/core/step.py`. Each phase has a
module with its rules in full: `agent/core/joining.py`, `running.py`, `stopping.py`, `clearing.py`.
[protocol.md](protocol.md) says what the agents write to the store.

Two rules hold in every phase:

- An event about workers names their generation. If this node does not run that generation, the event changes nothing.
- After `Looked`, `Leased`, `Committed` and `Cleared`, and when a time of its own is over, the agent looks at what the
  store's keys say now. It does what stands in the row `Looked`. Then it writes what is this node's to write: it joins a
  generation, or it leads (`agent/core/membership.py`).

"""
# The column of the last phase would say the same in each row.
_SHOWN = tuple(phase for phase in TABLE if phase is not Exited)
_MODES = """
A stop has one of four modes:
"""
_LEGEND = """
In the tables below a dash marks an event that changes nothing in that phase, and the words behind it say why. The phase
`Exited` has no column, since every event is ignored there."""
_PARTS: tuple[tuple[str, tuple[type[Event], ...]], ...] = (
    ("What the store says", (*get_args(StoreEvent), OwnStoreLost)),
    ("What becomes of the workers", get_args(WorkerEvent)),
    ("Signals, orders and time", (Signalled, RestartOrdered, Tick)),
)


def text_of(cell: Handler[Any, Any]) -> str:
    """The cell in words."""
    return f"– {cell.reason}" if isinstance(cell, Ignored) else _summary(cell)


def markdown() -> str:
    """The page docs/phases.md."""
    lines = [_PAGE_HEAD + "| phase | |", "|---|---|"]
    lines += [f"| `{phase.__name__}` | {_summary(phase)} |" for phase in TABLE]
    lines += [_MODES, "| mode | |", "|---|---|"]
    lines += [f"| `{mode.__name__}` | {_summary(mode)} |" for mode in get_args(Mode)]
    lines.append(_LEGEND)
    for title, events in _PARTS:
        apart = [event for event in events if len(set(_texts(event))) > 1]
        lines += ["", f"## {title}", "", *_table(apart, [phase.__name__ for phase in _SHOWN], _texts)]
    alike = [row.event for row in ROWS if len(set(_texts(row.event))) == 1]
    lines += ["", "## Alike in every phase", "", *_table(alike, ["in every phase"], lambda event: _texts(event)[:1])]
    return "\n".join(lines) + "\n"


def _texts(event: type[Event]) -> list[str]:
    return [text_of(TABLE[phase][event]) for phase in _SHOWN]


def _table(events: Sequence[type[Event]], phases: list[str], texts: Callable[[type[Event]], list[str]]) -> list[str]:
    head = ["event", *phases]
    rows = [[f"`{event.__name__}`: {_summary(event)}", *texts(event)] for event in events]
    return [_line(head), _line(["---"] * len(head)), *map(_line, rows)]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _summary(item: object) -> str:
    """The first sentence of its docstring."""
    first, _, _ = (inspect.getdoc(item) or "").partition("\n")
    return first.partition(". ")[0].removesuffix(".")


if __name__ == "__main__":
    print(markdown(), end="")


def step(agent: Agent, event: Event, now_s: float) -> Step:
    """What the agent becomes and does when `event` happens at `now_s` (monotonic)."""
    phase = agent.phase
    if isinstance(phase, Exited) or _is_of_another_generation(phase, event):
        return agent, ()
    if isinstance(event, Looked):
        agent, actions = _look(replace(agent, snapshot=event.snapshot), now_s)
        unreadable = (Say(f"{sentence}; going on without it", "warning") for sentence in event.snapshot.unreadable)
        return agent, (*unreadable, *actions)
    agent, actions = TABLE[type(phase)][type(event)](agent, phase, event, now_s)
    if not _is_to_look(agent, phase, event, now_s):
        return agent, actions
    agent, more = _look(replace(agent, lead_at_s=None) if isinstance(event, Tick) else agent, now_s)
    return agent, (*actions, *more)


def deadline_s(agent: Agent) -> float | None:
    """When the agent wants its next `Tick`, or None."""
    if isinstance(agent.phase, Exited):
        return None
    timers_s = (
        _phase_due_s(agent.phase),
        agent.lead_at_s,
        agent.waiting.due_s,
        agent.waiting.invite_s,
        agent.reach.unsaid_until_s,
        gives_up_at_s(agent),
    )
    return min((at_s for at_s in timers_s if at_s is not None), default=None)


def _phase_due_s(phase: Phase) -> float | None:
    match phase:
        case Running():
            return running.due_s(phase)
        case Stopping():
            return phase.next_s
        case Clearing():
            return clearing.due_s(phase)
    return None


def _is_of_another_generation(phase: Phase, event: Event) -> bool:
    match phase:
        case Running(table=table) | Stopping(table=table) | Clearing(table=table):
            return isinstance(event, WorkerEvent) and event.generation != table.generation
    return False


def _is_to_look(agent: Agent, before: Phase, event: Event, now_s: float) -> bool:
    """Whether what the event changed lets the agent make something else of what the store says."""
    match event:
        case _ if isinstance(agent.phase, Exited):
            return False
        case Leased() | Committed():
            return True
        case Cleared():
            return isinstance(before, Clearing)
        case Tick():
            return agent.lead_at_s is not None and now_s >= agent.lead_at_s
    return False


def _look(agent: Agent, now_s: float) -> Step:
    """Follow what the store says, then write to it what is this node's to write."""
    agent = _note_table(agent, now_s)
    agent, actions = TABLE[type(agent.phase)][Looked](agent, agent.phase, Looked(agent.snapshot), now_s)
    agent, more = attend(agent, now_s)
    return agent, (*actions, *more)


def _note_table(agent: Agent, now_s: float) -> Agent:
    table = agent.snapshot.table
    if table is None or table.generation == agent.table_seen[0]:
        return agent
    return replace(agent, table_seen=(table.generation, now_s))
