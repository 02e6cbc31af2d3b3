"""What an agent does: one row for each event, one column for each phase; `step` looks up its function here.

`python -m elaunch.agent.core.table` prints the page docs/phases.md, which shows the same table in words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_args

from elaunch.agent.core import (
    clearing,
    finished,
    joining,
    leaving,
    membership,
    orders,
    own_lease,
    own_store,
    running,
    stopping,
)
from elaunch.agent.core import store_outage as outage
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
from elaunch.agent.core.phases import Clearing, Exited, Finished, Joining, Mode, Phase, Running, Stopping
from elaunch.agent.core.state import Agent, Step

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
    Row(Looked, joining.looked, running.looked, stopping.looked, clearing.looked, finished.looked),
    _alike(Committed, membership.committed),
    Row(Leased, joining.begin_with_lease, own_lease.leased, own_lease.leased, own_lease.leased, own_lease.leased),
    Row(LeaseLost, joining.lose_lease,
        own_lease.lease_lost, own_lease.lease_lost, own_lease.lease_lost, own_lease.lease_lost),
    _alike(StoreAway, outage.store_failed),
    Row(StoreRefuses, joining.store_refuses,
        outage.store_failed, outage.store_failed, outage.store_failed, outage.store_failed),
    _alike(WatchRefused, outage.watch_refused),
    _alike(StoreBack, outage.store_back),
    Row(StoreLost,
        joining.store_lost, running.store_lost, stopping.store_lost, clearing.store_lost, finished.store_lost),
    Row(OwnStoreLost, own_store.lost_without_workers, own_store.lost_with_workers, own_store.lost_with_workers,
        own_store.lost_with_workers, own_store.lost_without_workers),
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
    Row(RestartOrdered, orders.restart, orders.restart, FORMING, FORMING, orders.restart),
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

<!-- Made by `python -m elaunch.agent.core.table > docs/phases.md`. -->

An agent is a state machine. Everything that happens to it is an event. This page says what it does with each event in
each phase. The page is made from the table by which the program itself decides, `agent/core/table.py`. Each phase has a
module with its rules in full: `agent/core/joining.py`, `running.py`, `stopping.py`, `clearing.py`, `finished.py`.
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
    # Imported here: only the page needs it, and each start would wait for it.
    import inspect

    first, _, _ = (inspect.getdoc(item) or "").partition("\n")
    return first.partition(". ")[0].removesuffix(".")


if __name__ == "__main__":
    print(markdown(), end="")
