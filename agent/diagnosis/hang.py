"""Detects that all ranks of this node are idle or report nothing, and makes the record of it for the leader; pure.

A rank is idle while it uses no CPU, or while it uses one whole CPU but touches no new memory, and
reads and writes nothing. It is also idle while torch's flight recorder shows a collective that has not ended, and the
rank enters no other: a rank that waits for its GPU spins. That alone proves nothing, so stacks are sampled repeatedly,
and each rank must be at the same place in all of them, and in the same collective. Where programs report steps and the
user gave a limit, ranks are idle while none of them reports, whatever they do.
`rendezvous/rules/hang_verdict.py` has the rule for the whole job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from elaunch.agent.diagnosis.stack_groups import Stack, location_text, ranks_text
from elaunch.agent.diagnosis.waits import Doing, does_where, doing, helpers_work, waits_for_ranks
from elaunch.rendezvous.rules.hang_verdict import GROUPS_MAX, IdleGroup, IdleNode, IdleReason
from elaunch.rendezvous.types import Seat


@dataclass(frozen=True)
class HangState:
    """This generation's workers as their agent observes them from outside.

    Those of `live` ran at the last sample. `idle` has how each idle rank is idle, and for how many seconds; `idle_s` is
    the time for which all of them are. `samples` counts how often stacks were taken since then; `stacks` are the last
    ones, and ranks in `held_gil` held the GIL in all of them. `reported` has each rank's last report, where reports
    count. `recorded` is this node's record in the store. `logged` is the last verdict that was logged.
    """

    live: frozenset[int] = frozenset()
    idle: Mapping[int, tuple[IdleKind, float]] = field(default_factory=dict)
    idle_s: float = 0.0
    samples: int = 0
    is_sampling: bool = False
    stacks: tuple[Stack, ...] = ()
    held_gil: frozenset[int] = frozenset()
    reported: Mapping[int, str] = field(default_factory=dict)
    recorded: IdleNode | None = None
    logged: str = ""


# The sampler's period. A much longer gap between two samples means that this agent was stopped, and perhaps its
# workers too.
SAMPLE_EVERY_S = 5.0
SAMPLE_GAP_S_MAX = 15.0
# Limits per second for an idle rank: threads that only wake up to read a clock stay far below.
_IDLE_CPU = 0.05
_BUSY_CPU = 0.9
_IO_BYTES = 4096
_FAULTS_IDLE = 20
_FAULTS_BUSY = 1
# While another thread, such as elaunch's own that replies to queries, has the GIL, the main one wakes up every 5 ms.
_SWITCHES_BUSY = 20
# Stacks are taken after these fractions of the limit, and then once per limit.
_STACKS_AT = (0.5, 0.75, 1.0)
# A wait that may end without the other ranks (a slow disk, a download, a long C function) gets this many limits.
PATIENCE = 5


class IdleKind(Enum):
    """How a rank is idle."""

    IDLE = "it uses no CPU"
    SPINS = "it uses one CPU, for nothing that is seen from outside"
    OUTSTANDING = "it uses a CPU, and one of its collectives does not end"
    STOPPED = "it is stopped, by a signal or a debugger"
    SILENT = "it reports nothing, and neither does any other rank of its node"


@dataclass(frozen=True)
class Window:
    """The activity of a worker's process between two samples, `seconds` apart.

    `cpu_s` is the CPU time of all its threads, `main_cpu_s` its main thread's, and `main_delay_s` how long that one
    waited for a CPU. `faults` are page faults. `state` is the letter in /proc/PID/stat. `io_bytes` were read and
    written, and the main thread slept `switches` times.

    `is_outstanding`: a collective has not ended, and the worker has entered and ended none meanwhile. `is_silent`: no
    worker of the node has reported anything, None where reports do not count; `reported` has what this one reported
    last, as the end of a sentence.
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


def after_windows(before: HangState, live: frozenset[int], windows: Mapping[int, Window]) -> HangState:
    """The state after another sample."""
    if before.live - live:
        # One has exited: the idle time of the others starts again.
        before = _without_stacks(replace(before, idle={}, idle_s=0.0))
    before = replace(before, live=live, reported={rank: windows[rank].reported for rank in live if rank in windows})
    known = ((rank, _after_window(before.idle.get(rank), windows[rank])) for rank in live if rank in windows)
    idle = {rank: found for rank, found in known if found}
    idle_s = min((for_s for _, for_s in idle.values()), default=0.0) if len(idle) == len(live) else 0.0
    after = replace(before, idle=idle, idle_s=idle_s)
    return after if idle_s >= before.idle_s > 0.0 else _without_stacks(after)


def stacks_are_due(state: HangState, record_at_s: float) -> bool:
    """Whether stacks are to be taken now, if ranks that are idle for `record_at_s` are reported to the leader."""
    due = _STACKS_AT[state.samples] if state.samples < len(_STACKS_AT) else state.samples - len(_STACKS_AT) + 2.0
    return not state.is_sampling and bool(state.idle) and state.idle_s >= due * record_at_s


def after_stacks(before: HangState, stacks: tuple[Stack, ...], first_rank: int) -> HangState:
    """The state with the stacks of another sample. A rank whose stack has changed is not idle."""
    before = replace(before, is_sampling=False)
    if not before.idle_s:
        return before
    known = {stack.rank: stack for stack in before.stacks} if before.samples else {}
    moved = {stack.rank - first_rank for stack in stacks if _has_moved(known.get(stack.rank, stack), stack)}
    moved -= {rank for rank, (how, _) in before.idle.items() if how is IdleKind.SILENT}
    gil = frozenset(stack.rank for stack in stacks if stack.main and stack.main.holds_gil)
    if moved:
        idle = {rank: (how, 0.0 if rank in moved else for_s) for rank, (how, for_s) in before.idle.items()}
        return _without_stacks(replace(before, idle=idle, idle_s=0.0))
    held = gil & before.held_gil if before.samples else gil
    return replace(before, samples=before.samples + 1, stacks=stacks, held_gil=held)


def record_of(
    state: HangState, seat: Seat, live: frozenset[int], awaited: frozenset[int], still_s: float, confirm_s: float
) -> IdleNode | None:
    """This node's record for the leader; None while its ranks work, or a person debugs one of them.

    The processes of `live` run; other ranks may wait for those of `awaited`, as the programs of the rest have ended.
    Ranks that are idle for `still_s` count as hung, and the leader must have observed `confirm_s` of that: it is
    notified so much earlier, and its verdict comes at the limit.
    """
    ended = [seat.first_rank + rank for rank in range(seat.slots) if rank not in awaited]
    exited, first, is_lingering = ranks_text(ended) if ended else "", ended[0] if ended else -1, awaited != live
    if is_lingering and not awaited:
        return IdleNode(seat.node_id, still_s, True, (), exited, first, is_lingering)
    if state.samples < len(_STACKS_AT) or state.idle_s < still_s - confirm_s:
        return None
    found: dict[tuple[IdleReason, str, str], list[Stack]] = {}
    is_patient = False
    for stack in state.stacks:
        local_rank = stack.rank - seat.first_rank
        if local_rank not in state.idle:
            # It has exited since.
            continue
        how = state.idle[local_rank][0]
        kind = _kind(state, stack, how)
        if kind is None:
            return None
        if how is not IdleKind.SILENT:
            may_continue = kind in (IdleReason.ELSEWHERE, IdleReason.UNKNOWN)
            is_patient |= may_continue or (kind is IdleReason.WAITS and _may_compute(stack, how))
        does = _does(kind, stack, state.reported.get(local_rank, ""))
        found.setdefault((kind, location_text(stack), does), []).append(stack)
    groups = tuple(
        IdleGroup(kind, same[0].rank, len(same), ranks_text([each.rank for each in same]), where, does, same[0].pid)
        for (kind, where, does), same in list(found.items())[:GROUPS_MAX]
    )
    is_ready = not is_patient or state.idle_s >= PATIENCE * still_s - confirm_s
    return IdleNode(seat.node_id, round(state.idle_s, 1), is_ready, groups, exited, first, is_lingering)


def has_changed(recorded: IdleNode | None, record: IdleNode | None) -> bool:
    """Whether the store needs the new record. One that differs in its seconds alone has not changed."""
    if recorded is None or record is None:
        return recorded is not record
    return (recorded.is_ready, recorded.groups, recorded.exited) != (record.is_ready, record.groups, record.exited)


def _after_window(before: tuple[IdleKind, float] | None, window: Window) -> tuple[IdleKind, float] | None:
    """How a rank is idle, and for how long, after another window; None while it works."""
    now = None if window.seconds > SAMPLE_GAP_S_MAX else _idle_kind(window)
    if now is None:
        return None
    known, for_s = before or (now, 0.0)
    is_same = known is now or IdleKind.OUTSTANDING in (known, now)
    return now, window.seconds + (for_s if is_same else 0.0)


def _without_stacks(state: HangState) -> HangState:
    return replace(state, samples=0, stacks=(), held_gil=frozenset())


def _idle_kind(window: Window) -> IdleKind | None:
    seconds = window.seconds
    if window.is_silent is not None:
        return IdleKind.SILENT if window.is_silent else None
    if window.state in ("T", "t"):
        return IdleKind.STOPPED
    if window.io_bytes > _IO_BYTES * seconds:
        return IdleKind.OUTSTANDING if window.is_outstanding else None
    if window.cpu_s + window.children_cpu_s <= _IDLE_CPU * seconds:
        is_idle = window.faults <= _FAULTS_IDLE * seconds
        return IdleKind.IDLE if is_idle else IdleKind.OUTSTANDING if window.is_outstanding else None
    if window.is_outstanding:
        return IdleKind.OUTSTANDING
    is_busy = window.main_cpu_s + window.main_delay_s >= _BUSY_CPU * seconds
    is_alike = window.faults <= _FAULTS_BUSY * seconds and window.switches <= _SWITCHES_BUSY * seconds
    return IdleKind.SPINS if is_busy and is_alike else None


def _has_moved(before: Stack, now: Stack) -> bool:
    is_elsewhere = bool(before.entered and now.entered) and before.entered != now.entered
    return is_elsewhere or _place(before) != _place(now)


def _place(stack: Stack) -> object:
    """The part that must be equal in two samples. A thread that only polls may be anywhere inside the polling call.

    A loop whose variables change (an index, a sum) will end.
    """
    main = stack.main
    if main is None:
        return None
    if main.is_active and doing(stack) is not Doing.GPU:
        return main.frames, main.values
    return tuple(frame for frame in main.frames if frame.is_users), doing(stack)


def _kind(state: HangState, stack: Stack, how: IdleKind) -> IdleReason | None:
    what = doing(stack)
    if what in (Doing.PROMPT, Doing.TRACED):
        return None
    if what is Doing.STOPPED or how is IdleKind.STOPPED:
        return IdleReason.STOPPED
    if what is Doing.UNKNOWN:
        return IdleReason.WAITS if stack.waits else IdleReason.UNKNOWN
    if waits_for_ranks(stack):
        return IdleReason.WAITS
    if how is IdleKind.OUTSTANDING and what is Doing.RUNS:
        # A thread that keeps the GIL does something itself: a rank that waits for its GPU does not keep it.
        return None if stack.rank in state.held_gil or not stack.waits else IdleReason.WAITS
    if how is IdleKind.SPINS:
        return IdleReason.RUNS if stack.rank in state.held_gil else IdleReason.ELSEWHERE
    if what is Doing.END or (what in (Doing.LOCK, Doing.LOADER) and not helpers_work(stack)):
        return IdleReason.STUCK
    return IdleReason.ELSEWHERE


def _may_compute(stack: Stack, how: IdleKind) -> bool:
    """Whether its GPU may still run kernels that were queued before the collective that it waits for."""
    what = doing(stack)
    return what is Doing.GPU or (how is IdleKind.OUTSTANDING and not what.is_for_ranks)


def _does(kind: IdleReason, stack: Stack, reported: str) -> str:
    """The middle of a sentence: what it does, where in the user's code, its last collective, and its last report."""
    entered = (f", {stack.entered}" if stack.entered else "") + (f", {reported}" if reported else "")
    if kind is IdleReason.UNKNOWN:
        return f"{'shows no stack' if reported else 'uses no CPU'} ({stack.trouble or 'no Python frame'}){entered}"
    if kind is IdleReason.WAITS and doing(stack) in (Doing.RUNS, Doing.UNKNOWN):
        where = stack.main.innermost_user_frame if stack.main else None
        return f"waits{f' in {where.text}' if where else ''}{entered}"
    # No number: each sample would then change the record, which is written to the store.
    line = ", at the same line in every sample" if doing(stack) is Doing.RUNS and not reported else ""
    return f"{does_where(stack)}{line}{entered}"
