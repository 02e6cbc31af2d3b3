"""The status of a job as records: from the store's keys, and from each node's agent. Pure.

`elaunch status` joins both. A node's report comes from its agent, by a socket or through the store; it is only shown to
a person, and nothing is decided from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated

from elaunch.rendezvous.codec import Between, Bounded, decode, keep_line
from elaunch.rendezvous.rules.hang_verdict import hang_sentence
from elaunch.rendezvous.rules.restart_policy import decisive_failure
from elaunch.rendezvous.rules.snapshot import Snapshot
from elaunch.rendezvous.types import Failure, Generation, Outcome, Terms, host_of

# More workers than any host has; a report of so many fits into a response.
RANKS_MAX = 1024
# More than thirty years; no host runs so long.
_Time = Annotated[float, Between(0, 1e9)]
# No host has as much memory, and none has as many CPUs or processes that wait for one.
_Bytes = Annotated[int, Between(0, 1 << 60)]
_COUNT = Between(0, 1 << 30)
_Name = Annotated[str, keep_line(512)]
_Sentence = Annotated[str, keep_line(1 << 10)]


class JobState(Enum):
    """The state of the job as a whole."""

    FORMING = "forming"
    RUNNING = "running"
    ENDED = "ended"
    GONE = "gone"  # Its keys exist, but it has no members.


@dataclass(frozen=True)
class RankReport(Bounded):
    """One worker.

    `state` is starting (it has no process yet), running, stopped (by SIGSTOP or a debugger), exited or done.
    `step` is -1 and `phase` empty where none was reported.

    `step_s` is the mean time of its last steps, `reported_ago_s` the time since the last report. `memory_bytes`
    is the resident memory of its process, without the processes that it has started. `wait_share` is the share of the
    last minutes in which it waited in collectives.
    """

    rank: int
    local_rank: int
    pid: int
    state: str = "running"
    step: int = -1
    phase: Annotated[str, keep_line(128)] = ""
    step_s: _Time | None = None
    reported_ago_s: _Time | None = None
    memory_bytes: _Bytes | None = None
    wait_share: Annotated[float, Between(0, 1.001)] | None = None


@dataclass(frozen=True)
class NodeReport(Bounded):
    """One node, as its agent (`pid`, since `age_s`) sees it.

    `state` is waiting, running, stopping, done or ended. `generation` is what its workers run, or ran last, -1 for
    none; they were started `workers_age_s` ago. `waiting` is what the node waits for, `trouble` what is wrong with the
    store.

    The host has `memory_bytes`, of which `memory_free_bytes` are available, `cpus`, and a load of `load` over the last
    minute. `topology` is as in `Node`.
    """

    node_id: _Name
    host: _Name
    pid: int
    state: str
    age_s: _Time
    generation: int = -1
    workers_age_s: _Time | None = None
    waiting: _Sentence = ""
    trouble: _Sentence = ""
    ranks: tuple[RankReport, ...] = ()
    memory_bytes: _Bytes | None = None
    memory_free_bytes: _Bytes | None = None
    cpus: Annotated[int, _COUNT] | None = None
    load: Annotated[float, _COUNT] | None = None
    topology: _Sentence = ""


@dataclass(frozen=True)
class SeatReport:
    """One node's seat in the newest table. `is_member`: its lease holds; None where that is not known."""

    node_id: str
    host: str
    first_rank: int
    slots: int
    is_member: bool | None = None


@dataclass(frozen=True)
class JobReport:
    """A job according to its keys in the store.

    `generation` is the newest one, and `seats` are those of its table, or of the last one while it forms. `others` are
    members without a seat. Without `is_whole` only the keys that all nodes watch were read: no members, no failures.
    `failure` is the newest one, without traceback and output. `hang` is how the newest generation hangs, empty if it
    does not.
    """

    run_id: str
    state: JobState
    is_whole: bool
    terms: Terms | None = None
    generation: Generation | None = None
    seats: tuple[SeatReport, ...] = ()
    others: tuple[str, ...] = ()
    leader: str = ""
    restarts: int = 0
    restart_ages_s: tuple[float, ...] = ()
    failure: Failure | None = None
    hang: str = ""
    ended: Outcome | None = None


def job_report(snapshot: Snapshot) -> JobReport:
    """The report of the job in a snapshot."""
    table, members = snapshot.table, snapshot.members
    seats = tuple(
        SeatReport(it.node_id, it.host, it.first_rank, it.slots, it.node_id in members if snapshot.whole else None)
        for it in (table.seats if table else ())
    )
    seated = {seat.node_id for seat in seats}
    return JobReport(
        snapshot.keys.run_id,
        _state(snapshot),
        snapshot.whole,
        snapshot.terms,
        snapshot.generation,
        seats,
        tuple(sorted(node_id for node_id in members if node_id not in seated)),
        snapshot.leader,
        table.restarts if table else 0,
        table.restart_ages_s if table else (),
        _newest_failure(snapshot),
        _hang(snapshot),
        replace(snapshot.ended, failure=None) if snapshot.ended else None,
    )


def read_node_report(text: str, node_id: str) -> NodeReport | None:
    """That node's report; None if the text is not a report, or is another node's."""
    try:
        report = decode(NodeReport, text)
    except ValueError:
        return None
    return report if report.node_id == node_id and len(report.ranks) <= RANKS_MAX else None


def _state(snapshot: Snapshot) -> JobState:
    if snapshot.ended:
        return JobState.ENDED
    if snapshot.whole and not snapshot.members:
        return JobState.GONE
    return JobState.RUNNING if snapshot.current_table else JobState.FORMING


def _hang(snapshot: Snapshot) -> str:
    hang, newest = snapshot.hang, snapshot.generation
    return hang_sentence(hang, host_of(hang.node_id)) if hang and newest and hang.generation == newest.number else ""


def _newest_failure(snapshot: Snapshot) -> Failure | None:
    if snapshot.ended and snapshot.ended.failure:
        return snapshot.ended.failure.opening
    if not snapshot.failures:
        return None
    return decisive_failure(snapshot.failures[max(snapshot.failures)]).opening
