"""The phases of an agent: joining, running, stopping, clearing, finished, exited."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elaunch.agent.core.events import Signalled
from elaunch.agent.core.hang import Quiet
from elaunch.agent.core.still import Standstill
from elaunch.rendezvous.types import Failure, Outcome, RankTable, Seat

# A rank whose program is over closes its connections before it has an exit status. Its exit functions take a while.
EXIT_S = 3.0


@dataclass(frozen=True)
class Joining:
    """No worker of this node runs; it enters the job, joins its generations, and waits for a seat.

    `asked` is the newest generation that it has joined, `ran` the newest that it has run. The store may be slow to tell
    that another was opened, and the old table, which still stands then, must not start workers again. `spare_of` is the
    newest generation that had no seat for it.
    """

    asked: int = -1
    ran: int = -1
    spare_of: int = -1


NOT_JOINED = Joining()


@dataclass(frozen=True)
class LinkWords:
    """What a generation's workers have said on their links, by local rank.

    Those in `to_stop` want to be told there when to stop, those in `to_failure` that a peer failed; those in `hearing`
    have listened to something, so that a thread of theirs hears what they are told. Those in `stopped` have come to the
    step boundary at which all ranks stop, those in `saving` save after a failure. The programs of those in `over_s`, at
    those times, have ended before anybody asked them to end: by an exception, or as those in `returned_s`, at the times
    at which the agent knew.
    """

    hearing: frozenset[int] = frozenset()
    to_stop: frozenset[int] = frozenset()
    to_failure: frozenset[int] = frozenset()
    stopped: frozenset[int] = frozenset()
    saving: frozenset[int] = frozenset()
    returned_s: tuple[tuple[int, float], ...] = ()
    over_s: tuple[tuple[int, float], ...] = ()

    @property
    def over(self) -> list[int]:
        """Those whose programs have ended, in the order in which they left their group."""
        return [rank for rank, _ in sorted(self.over_s, key=lambda each: each[1])]

    @property
    def returned(self) -> frozenset[int]:
        return frozenset(rank for rank, _ in self.returned_s)

    def exiting(self, now_s: float) -> frozenset[int]:
        """Those whose programs have ended just now: their exit status is about to come. Others linger."""
        return frozenset(rank for rank, at_s in self.returned_s if now_s < at_s + 2 * EXIT_S)


@dataclass(frozen=True)
class HeldEnd:
    """An end that may turn out to be somebody's wish: until `until_s` this agent may hear of that.

    `failure` is what it is otherwise, None where the last worker exited with 0. `is_stop` says that the worker had
    stopped at a step boundary, as all ranks of the job did; else the scheduler may have signalled it. `timed_out` is
    the sentence of a failure, this node's or another's, by a collective that timed out: the stacks of workers that may
    not have come to it are being taken. `effects` are failures that another rank may have caused, and its exit is
    awaited; `told` is what such ranks have told of their end.
    """

    failure: Failure | None
    until_s: float
    is_stop: bool = False
    timed_out: str = ""
    effects: tuple[Failure, ...] = ()
    told: tuple[Failure, ...] = ()


SILENT = LinkWords()
NOT_QUIET = Quiet()
NOT_STILL = Standstill()


@dataclass(frozen=True)
class Running:
    """This node's workers run.

    Those of `live` do; `held` is the end of one that waits to be understood. `leaving_s` holds until when each worker
    whose program raised an exception may take its time to end, `lingers_s` when one whose program ended well is named,
    if its process is still there. `is_first` says that this agent ran no generation
    before. `quiet` is how long nothing was reported, `standstill` how the workers look from outside. `ends` are the
    records of workers that exited with 0, in order.
    """

    table: RankTable
    live: frozenset[int]
    leaving_s: tuple[tuple[int, float], ...] = ()
    lingers_s: tuple[tuple[int, float], ...] = ()
    held: HeldEnd | None = None
    is_first: bool = True
    words: LinkWords = SILENT
    quiet: Quiet = NOT_QUIET
    standstill: Standstill = NOT_STILL
    ends: tuple[Failure, ...] = ()

    @property
    def is_broken(self) -> bool:
        """Whether a collective has timed out, so that no step ends any more."""
        return self.held is not None and bool(self.held.timed_out)

    @property
    def has_lost_step(self) -> bool:
        """Whether a worker has lost a peer, or a collective has timed out: no worker comes to a step boundary."""
        return self.held is not None and bool(self.held.timed_out or self.held.effects)

    def seat_of(self, node_id: str) -> Seat:
        """This node's seat. A node that comes back under another name has stopped its workers before."""
        group_rank = self.table.group_rank(node_id)
        assert group_rank is not None
        return self.table.seats[group_rank]


@dataclass(frozen=True)
class AtBoundary:
    """Workers that listen on their links stop after the same step as all ranks; the others got a signal.

    Those in `signalled` got `signum`. A worker that has not come to its step's end by `until_s` gets SIGTERM, where
    that is set. `notice` is a scheduler's signal that another node had first and that was passed on here, 0 if there
    was none.
    """

    signalled: frozenset[int] = frozenset()
    signum: int = 0
    notice: int = 0
    until_s: float | None = None


@dataclass(frozen=True)
class Broken:
    """A rank failed, so no step ends any more; workers that listen save what only they hold, the others got a signal.

    Those in `signalled` got `signum`. Those in `spent` were killed alone: as soon as they had saved, or while others
    save. `notice` as in `AtBoundary`.
    """

    signalled: frozenset[int]
    signum: int
    notice: int = 0
    spent: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Killing:
    """All got SIGKILL; if one is not gone in time, the fork server is replaced.

    `notice` as in `AtBoundary`.
    """

    notice: int = 0


Mode = AtBoundary | Broken | Killing
UNTOLD = AtBoundary()


@dataclass(frozen=True)
class Stopping:
    """Workers are to end, and some still run.

    Those of `live` do, of which there is at least one; `mode` is how they were told. They have until `due_s`, `grace_s`
    after they were told: SIGKILL comes then, and later another fork server. `failures` are this node's of the
    generation: the first one, then those that came while it was stopping and were not its doing. Those in `answered`
    may have exited with a code that our signal made. `ends` as in `Running`. `then` is the outcome that the agent exits
    with afterwards, None where it goes on.
    """

    table: RankTable
    live: frozenset[int]
    due_s: float
    grace_s: float
    mode: Mode = UNTOLD
    words: LinkWords = SILENT
    then: Outcome | None = None
    failures: tuple[Failure, ...] = ()
    answered: frozenset[int] = frozenset()
    ends: tuple[Failure, ...] = ()

    @classmethod
    def of(cls, running: Running, now_s: float, grace_s: float) -> Stopping:
        """The stop of running workers, before any of them has been told.

        A collective that timed out or lost a peer stays a failure; other ends that are held were the wish that the stop
        is for.
        """
        held = running.held
        failures = held.effects if held else ()
        if held and held.failure and running.is_broken:
            failures = (held.failure,)
        # A process that lingers is signalled like any other.
        exiting, returned_s = running.words.exiting(now_s), running.words.returned_s
        words = replace(running.words, returned_s=tuple(each for each in returned_s if each[0] in exiting))
        due_s, ends = now_s + grace_s, running.ends
        return cls(running.table, running.live, due_s, grace_s, words=words, failures=failures, ends=ends)

    @property
    def reached(self) -> frozenset[int]:
        """Those that got a signal that asks them to end."""
        return self.mode.signalled if isinstance(self.mode, (AtBoundary, Broken)) else frozenset()

    @property
    def spent(self) -> frozenset[int]:
        """Those that were killed alone."""
        return self.mode.spent if isinstance(self.mode, Broken) else frozenset()

    @property
    def on_the_way(self) -> frozenset[int]:
        """Those that were asked to stop at a step boundary, and have not come to it yet."""
        if not isinstance(self.mode, AtBoundary):
            return frozenset()
        return self.live - self.mode.signalled - self.words.stopped

    @property
    def saving(self) -> frozenset[int]:
        """Those that save after a failure."""
        if not isinstance(self.mode, Broken):
            return frozenset()
        return (self.live & self.words.saving) - self.mode.signalled - self.mode.spent

    @property
    def next_s(self) -> float:
        """When something is to be done to the workers, if they do not end before."""
        if isinstance(self.mode, AtBoundary) and self.mode.until_s is not None:
            return min(self.due_s, self.mode.until_s)
        return self.due_s

    def hurried(self, now_s: float, grace_s: float) -> Stopping:
        """With no more time than that from now on."""
        return self if self.due_s <= now_s + grace_s else replace(self, due_s=now_s + grace_s, grace_s=grace_s)


@dataclass(frozen=True)
class WorkersStopped:
    """The workers were stopped, or failed; `failures`, `ends` and `answered` as in `Stopping`."""

    failures: tuple[Failure, ...] = ()
    ends: tuple[Failure, ...] = ()
    answered: frozenset[int] = frozenset()


@dataclass(frozen=True)
class WorkersDone:
    """All workers exited with 0; `ends` as in `Running`.

    `summons` is a signal that came since: it is obeyed once that is recorded.
    """

    ends: tuple[Failure, ...] = ()
    summons: Signalled | None = None


@dataclass(frozen=True)
class Clearing:
    """The last worker is gone; what is left of the generation is ended, and its output collected.

    `ended` is how the workers came to their end. `then` as in `Stopping`. An agent that is to exit waits for the output
    until `until_s`.
    """

    table: RankTable
    until_s: float
    ended: WorkersStopped | WorkersDone
    then: Outcome | None = None


@dataclass(frozen=True)
class Finished:
    """All workers of this node exited with 0; the agent stays until the job has ended. `ends` as in `Running`.

    It has reported that under the guard that the generation's key is as at revision `reported`.
    """

    table: RankTable
    ends: tuple[Failure, ...] = ()
    reported: int = 0


@dataclass(frozen=True)
class Exited:
    """The agent's work is done."""

    outcome: Outcome


Phase = Joining | Running | Stopping | Clearing | Finished | Exited
