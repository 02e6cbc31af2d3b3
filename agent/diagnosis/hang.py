"""When all ranks of this node are idle or report nothing, and what it tells the job's leader then; pure.

A rank stands still while it uses no CPU, or while it uses one whole CPU for nothing else: no memory is touched for the
first time, nothing is read or written. It also stands still while torch's flight recorder says that a collective has
not ended, and that the rank has entered no other: a rank that waits for its GPU spins. That alone proves nothing, so
stacks are taken, again and again, and each rank must be at the same place in all of them, and in the same collective.
Where programs report steps and the user gave a limit, ranks are idle while none of them reports, whatever they do.
`rendezvous/rules/hang_verdict.py` has the rule for the whole job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from elaunch.agent.diagnosis.stack_groups import Stack, place_words, ranks_words
from elaunch.agent.diagnosis.waits import Doing, does_where, doing, helpers_work, waits_for_ranks
from elaunch.rendezvous.rules.hang_verdict import GROUPS_MAX, IdleGroup, IdleNode, IdleReason
from elaunch.rendezvous.types import Seat


@dataclass(frozen=True)
class Standstill:
    """This generation's workers as their agent sees them from outside.

    Those of `live` ran at the last look. `still` says how each rank stands still and for how many seconds; `spell_s` is
    for how long all of them do. Stacks were taken in `looks` looks of this standstill; `stacks` are the last ones, and
    ranks in `held_gil` held the GIL in all of them. `reported` is what each rank reported last, where reports count.
    `told` is this node's record in the store. `said` is the verdict that the log has.
    """

    live: frozenset[int] = frozenset()
    still: Mapping[int, tuple[Sort, float]] = field(default_factory=dict)
    spell_s: float = 0.0
    looks: int = 0
    is_looking: bool = False
    stacks: tuple[Stack, ...] = ()
    held_gil: frozenset[int] = frozenset()
    reported: Mapping[int, str] = field(default_factory=dict)
    told: IdleNode | None = None
    said: str = ""


# The sampler looks this often. A longer time between two looks has passed without this agent: it was stopped, and so
# were its workers, perhaps.
LOOK_EVERY_S = 5.0
LOOK_S_MAX = 15.0
# Per second, of a rank that stands still: threads that only wake up to look at a clock stay far below.
_IDLE_CPU = 0.05
_BUSY_CPU = 0.9
_IO_BYTES = 4096
_FAULTS_IDLE = 20
_FAULTS_BUSY = 1
# While another thread of the process has the GIL, as elaunch's own that answers, the main thread wakes up each 5 ms.
_SWITCHES_BUSY = 20
# Stacks are taken when this part of the limit is over, and then once in each limit's time.
_LOOKS_AT = (0.5, 0.75, 1.0)
# What may go on by itself gets this many times the limit: a slow disk, a download, a long computation in C.
PATIENCE = 5


class Sort(Enum):
    """How a rank stands still."""

    IDLE = "it uses no CPU"
    SPINS = "it uses one CPU, for nothing that is seen from outside"
    OUTSTANDS = "it uses a CPU, and a collective of it does not end"
    STOPPED = "a signal or a debugger holds it"
    SILENT = "it reports nothing, and neither does any other rank of its node"


@dataclass(frozen=True)
class Window:
    """What a worker's process did between two looks, `seconds` apart.

    `cpu_s` is the CPU time of all its threads, `main_cpu_s` its main thread's, and `main_delay_s` how long that one
    waited for a CPU. `faults` are page faults. `state` is the letter in /proc/PID/stat. `io_bytes` were read and
    written, and the main thread slept `switches` times.

    `is_outstanding` says that a collective has not ended, and that the worker has entered and ended none meanwhile.
    `is_silent` says that no worker of the node has reported anything, None where reports do not count; `reported` has
    what this one reported last, as the end of a sentence.
    """

    seconds: float
    cpu_s: float
    main_cpu_s: float
    main_delay_s: float
    faults: float
    state: str
    io_bytes: float = 0
    switches: float = 0
    children_cpu_s: float = 0.0
    is_outstanding: bool = False
    is_silent: bool | None = None
    reported: str = ""


@dataclass(frozen=True)
class HangLimit:
    """For how long all ranks of the job must stand still to hang, and for how long of that the leader must know it."""

    still_s: float
    confirm_s: float


def after_windows(before: Standstill, live: frozenset[int], windows: Mapping[int, Window]) -> Standstill:
    """The state after another look."""
    if before.live - live:
        # One has exited: what the others do now begins now.
        before = _afresh(replace(before, still={}, spell_s=0.0))
    before = replace(before, live=live, reported={rank: windows[rank].reported for rank in live if rank in windows})
    looks = ((rank, _after_window(before.still.get(rank), windows[rank])) for rank in live if rank in windows)
    still = {rank: found for rank, found in looks if found}
    spell_s = min((for_s for _, for_s in still.values()), default=0.0) if len(still) == len(live) else 0.0
    after = replace(before, still=still, spell_s=spell_s)
    return after if spell_s >= before.spell_s > 0.0 else _afresh(after)


def wants_stacks(state: Standstill, limit: HangLimit) -> bool:
    """Whether stacks are to be taken now."""
    due = _LOOKS_AT[state.looks] if state.looks < len(_LOOKS_AT) else state.looks - len(_LOOKS_AT) + 2.0
    return not state.is_looking and bool(state.still) and state.spell_s >= due * _told_at_s(limit)


def after_stacks(before: Standstill, stacks: tuple[Stack, ...], first_rank: int) -> Standstill:
    """The state with the stacks of another look. A rank that is at another place now does not stand still."""
    before = replace(before, is_looking=False)
    if not before.spell_s:
        return before
    known = {stack.rank: stack for stack in before.stacks} if before.looks else {}
    moved = {stack.rank - first_rank for stack in stacks if _has_moved(known.get(stack.rank, stack), stack)}
    moved -= {rank for rank, (sort, _) in before.still.items() if sort is Sort.SILENT}
    gil = frozenset(stack.rank for stack in stacks if stack.main and stack.main.holds_gil)
    if moved:
        still = {rank: (sort, 0.0 if rank in moved else for_s) for rank, (sort, for_s) in before.still.items()}
        return _afresh(replace(before, still=still, spell_s=0.0))
    held = gil & before.held_gil if before.looks else gil
    return replace(before, looks=before.looks + 1, stacks=stacks, held_gil=held)


def record_of(
    state: Standstill, seat: Seat, live: frozenset[int], awaited: frozenset[int], limit: HangLimit
) -> IdleNode | None:
    """What this node tells the leader; None while its ranks work, or a person is at work in one of them.

    The processes of `live` run; other ranks may wait for those of `awaited`, as the programs of the rest have ended.
    """
    gone = [seat.first_rank + rank for rank in range(seat.slots) if rank not in awaited]
    words, first, is_lingering = ranks_words(gone) if gone else "", gone[0] if gone else -1, awaited != live
    if is_lingering and not awaited:
        return IdleNode(seat.node_id, limit.still_s, True, (), words, first, is_lingering)
    if state.looks < len(_LOOKS_AT) or state.spell_s < _told_at_s(limit):
        return None
    found: dict[tuple[IdleReason, str, str], list[Stack]] = {}
    is_patient = False
    for stack in state.stacks:
        if stack.rank - seat.first_rank not in state.still:
            # It has exited since.
            continue
        sort = state.still[stack.rank - seat.first_rank][0]
        kind = _kind(state, stack, sort)
        if kind is None:
            return None
        if sort is not Sort.SILENT:
            may_go_on = kind in (IdleReason.ELSEWHERE, IdleReason.UNKNOWN)
            is_patient |= may_go_on or (kind is IdleReason.WAITS and _may_compute(stack, sort))
        does = _does(kind, stack, state.reported.get(stack.rank - seat.first_rank, ""))
        found.setdefault((kind, place_words(stack), does), []).append(stack)
    groups = tuple(
        IdleGroup(kind, same[0].rank, len(same), ranks_words([each.rank for each in same]), where, does, same[0].pid)
        for (kind, where, does), same in list(found.items())[:GROUPS_MAX]
    )
    is_ready = not is_patient or state.spell_s >= _told_at_s(limit, PATIENCE)
    return IdleNode(seat.node_id, round(state.spell_s, 1), is_ready, groups, words, first, is_lingering)


def is_news(told: IdleNode | None, record: IdleNode | None) -> bool:
    """Whether the store must learn of it. How long it lasts is no news."""
    if told is None or record is None:
        return told is not record
    return (told.is_ready, told.groups, told.exited) != (record.is_ready, record.groups, record.exited)


def _after_window(before: tuple[Sort, float] | None, window: Window) -> tuple[Sort, float] | None:
    """How a rank stands still, and for how long, after another window; None while it works."""
    if window.seconds > LOOK_S_MAX:
        return None
    sort_now = _sort(window)
    if sort_now is None:
        return None
    known, for_s = before or (sort_now, 0.0)
    is_same = known is sort_now or Sort.OUTSTANDS in (known, sort_now)
    return sort_now, window.seconds + (for_s if is_same else 0.0)


def _afresh(state: Standstill) -> Standstill:
    return replace(state, looks=0, stacks=(), held_gil=frozenset(), is_looking=state.is_looking)


def _told_at_s(limit: HangLimit, times: int = 1) -> float:
    """How long the ranks have stood still when the leader is told, so that its verdict comes at the limit."""
    return times * limit.still_s - limit.confirm_s


def _sort(window: Window) -> Sort | None:
    seconds = window.seconds
    if window.is_silent is not None:
        return Sort.SILENT if window.is_silent else None
    if window.state in ("T", "t"):
        return Sort.STOPPED
    if window.io_bytes > _IO_BYTES * seconds:
        return Sort.OUTSTANDS if window.is_outstanding else None
    if window.cpu_s + window.children_cpu_s <= _IDLE_CPU * seconds:
        is_idle = window.faults <= _FAULTS_IDLE * seconds
        return Sort.IDLE if is_idle else Sort.OUTSTANDS if window.is_outstanding else None
    if window.is_outstanding:
        return Sort.OUTSTANDS
    is_busy = window.main_cpu_s + window.main_delay_s >= _BUSY_CPU * seconds
    is_alike = window.faults <= _FAULTS_BUSY * seconds and window.switches <= _SWITCHES_BUSY * seconds
    return Sort.SPINS if is_busy and is_alike else None


def _has_moved(before: Stack, now: Stack) -> bool:
    is_elsewhere = bool(before.entered and now.entered) and before.entered != now.entered
    return is_elsewhere or _place(before) != _place(now)


def _place(stack: Stack) -> object:
    """What must be equal in two looks. A thread that only polls may be anywhere inside of the call that polls.

    A loop whose variables change comes to an end some day: an index, a sum.
    """
    main = stack.main
    if main is None:
        return None
    if main.is_active and doing(stack) is not Doing.GPU:
        return main.frames, main.values
    return tuple(frame for frame in main.frames if frame.is_users), doing(stack)


def _kind(state: Standstill, stack: Stack, sort: Sort) -> IdleReason | None:
    what = doing(stack)
    if what in (Doing.PROMPT, Doing.TRACED):
        return None
    if what is Doing.STOPPED or sort is Sort.STOPPED:
        return IdleReason.STOPPED
    if what is Doing.UNKNOWN:
        return IdleReason.WAITS if stack.waits else IdleReason.UNKNOWN
    if waits_for_ranks(stack):
        return IdleReason.WAITS
    if sort is Sort.OUTSTANDS and what is Doing.RUNS:
        # What lets no other thread run Python does something itself: a rank that waits for its GPU does not.
        return None if stack.rank in state.held_gil or not stack.waits else IdleReason.WAITS
    if sort is Sort.SPINS:
        return IdleReason.RUNS if stack.rank in state.held_gil else IdleReason.ELSEWHERE
    if what is Doing.END or (what in (Doing.LOCK, Doing.LOADER) and not helpers_work(stack)):
        return IdleReason.STUCK
    return IdleReason.ELSEWHERE


def _may_compute(stack: Stack, sort: Sort) -> bool:
    """Whether its GPU may still do what the program gave it before the collective that it waits for."""
    what = doing(stack)
    return what is Doing.GPU or (sort is Sort.OUTSTANDS and not what.is_for_ranks)


def _does(kind: IdleReason, stack: Stack, reported: str) -> str:
    """The middle of a sentence: what it does, where in the user's code, its last collective, and its last report."""
    entered = (f", {stack.entered}" if stack.entered else "") + (f", {reported}" if reported else "")
    if kind is IdleReason.UNKNOWN:
        return f"{'shows no stack' if reported else 'uses no CPU'} ({stack.trouble or 'no Python frame'}){entered}"
    if kind is IdleReason.WAITS and doing(stack) in (Doing.RUNS, Doing.UNKNOWN):
        where = stack.main.innermost_user_frame if stack.main else None
        return f"waits{f' in {where.words}' if where else ''}{entered}"
    # Without a number: each look would change the record, and the store would hear of it.
    looks = ", at the same line in every look" if doing(stack) is Doing.RUNS and not reported else ""
    return f"{does_where(stack)}{looks}{entered}"
