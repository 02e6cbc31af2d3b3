"""Which survivors of a failure can do nothing with their signal; pure.

Python runs a handler in the main thread, between two of its instructions. A survivor that waits in a collective never
comes to its handler, or its handler has entered that collective (Lightning's does). All ranks must come to a collective
of the default group, and one of them has failed: it can end only by an error. `agent/workers/survivor_watch.py` looks.

Whatever else the worker may be doing is a reason to wait: a thread or a child that is not known to be idle, a system
call that is no wait, a byte written, a collective of fewer ranks, a short timeout. So is all that cannot be seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elaunch.agent.core.collectives import Counts, read_counts
from elaunch.agent.core.stack_groups import Frame
from elaunch.agent.core.waits import BACKWARD, COLLECTIVES_FILE
from elaunch.records import dataclass, field, replace
from elaunch.strict_json import parse_json
from elaunch.threads import only_listens

LOOK_EVERY_S = 0.01
# A survivor that does nothing for so long is stuck. Where a rank has ended, its peers' sockets say so in a millisecond.
STUCK_S = 0.06
# The same where the kernel counts each thread's time to the nanosecond: what runs between two looks is seen then.
STUCK_COUNTED_S = 0.03
# Of that time all threads but the one that answers and gloo's may run so long.
_RAN_NS_MAX, _RAN_SHARE_MAX = 1_000_000, 0.05
# A collective with a shorter timeout may end by an error within the grace, and a handler may go on from there.
_TIMEOUT_S_MIN = 60.0
# One tick of the kernel's CPU times, for the thread that answers.
_CPU_S_MAX = 0.015
# Not monitored_barrier, which has a timeout of its own, and no messages between two ranks: both may live.
_COLLECTIVES = {
    *("all_reduce", "broadcast", "barrier", "reduce", "gather", "scatter", "all_to_all", "all_to_all_single"),
    *("all_gather", "all_gather_single", "all_gather_into_tensor", "all_gather_coalesced", "all_reduce_coalesced"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
}
_MAIN_WAITS_IN = "futex"
_WAITS_IN = {
    *("futex", "epoll_wait", "epoll_pwait", "poll", "ppoll", "select", "pselect6", "nanosleep", "clock_nanosleep"),
    *("read", "recvfrom", "recvmsg", "accept", "accept4"),
}
# Where threads of libraries wait until somebody gives them work, or look at a clock.
_IDLE_IN = {
    ("_worker", "concurrent/futures/thread.py"),
    ("_feed", "multiprocessing/queues.py"),
    ("run", "tqdm/_monitor.py"),
    ("do_one_step", "torch/utils/data/_utils/pin_memory.py"),
    ("_run", "tensorboard/summary/writer/event_file_writer.py"),
}
# What torch calls the processes of a DataLoader.
_LOADER = "pt_data_worker"
# How they wait there. A threading.Timer has no other frame, and does something when its time has come.
_WAITS = ("threading.py", "queue.py", "selectors.py", "multiprocessing/connection.py", "multiprocessing/queues.py")


@dataclass(frozen=True)
class Inside:
    """What a worker's own thread says of the others, at one moment.

    `at` is the instruction of the main thread's innermost frame, and `main` that frame. `others` are the frames of the
    other threads that run Python, innermost first. `answers` is the id of the thread that says so, which is elaunch's:
    it may be awake, since it is asked again and again. `loops` are the ids of gloo's threads, which move bytes between
    ranks: one whose peer has gone turns without end. `tracker` is the pid of Python's resource tracker, -1 for none.
    `ranks` and `timeout_s` are those of the default group, `counts` those of all groups.
    """

    at: tuple[int, int]
    main: Frame
    others: tuple[tuple[Frame, ...], ...]
    answers: int
    loops: frozenset[int]
    tracker: int
    ranks: int
    timeout_s: float
    counts: Counts


@dataclass(frozen=True)
class Outside:
    """What the kernel says of a worker.

    `calls` are the system calls in which its threads sleep, by thread id, with their arguments: empty for a thread that
    runs, or that may not be looked into. `children` are the names of its child processes, by pid. `ran_ns` is how long
    each thread has run, by thread id; empty where the kernel does not count that. `is_pending` says that its SIGTERM
    has not been delivered.
    """

    main: int
    calls: Mapping[int, tuple[str, str]]
    children: Mapping[int, str]
    written_bytes: int
    cpu_s: float
    ran_ns: Mapping[int, int] = field(default_factory=dict)
    is_pending: bool = False


@dataclass(frozen=True)
class SurvivorLook:
    """A worker at one moment."""

    inside: Inside
    outside: Outside


@dataclass(frozen=True)
class Stillness:
    """A worker has waited in vain from `since_s`, when it was as `look` says, to `until_s`, when it was seen last."""

    since_s: float
    until_s: float
    look: SurvivorLook


def read_inside(text: bytes) -> Inside | None:
    """The answer of a worker's thread; None if it has another form. The worker may answer anything."""
    line, _, dumps = text.partition(b"\n")
    try:
        told: dict[str, Any] = parse_json(line)
        frame, instruction = told["at"]
        others = tuple(tuple(_frame(call) for call in calls) for calls in told["others"])
        answers, tracker = int(told["answers"]), int(told["tracker"] or -1)
        loops = frozenset(map(int, told["loops"]))
        at, main = (int(frame), int(instruction)), _frame(told["main"][0])
        ranks, timeout_s = int(told["ranks"]), float(told["timeout_s"])
        return Inside(at, main, others, answers, loops, tracker, ranks, timeout_s, read_counts(dumps))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None


def waits_in_collective(inside: Inside, world_size: int) -> bool:
    """Whether nothing of Python's can go on there before a collective of all ranks ends."""
    outstanding = {group for (_, group), count in inside.counts.items() if count.is_outstanding}
    # A backend of which none has ended may not count ends: such a group may have a collective that goes on.
    is_known = all(count.ended >= 0 for count in inside.counts.values() if count.entered > 0)
    return (
        is_known
        and outstanding == {0}
        and inside.ranks == world_size
        and inside.timeout_s >= _TIMEOUT_S_MIN
        and bool(collective(inside.main))
        and all(map(_is_idle, inside.others))
    )


def collective(frame: Frame) -> str:
    """The name of the collective in whose wait this frame is; empty if it is elsewhere."""
    if (frame.function, frame.short_file) == BACKWARD:
        return "the all-reduce of a backward pass"
    is_one = frame.short_file == COLLECTIVES_FILE and frame.function in _COLLECTIVES
    return frame.function if is_one else ""


def after(before: Stillness | None, look: SurvivorLook, world_size: int, now_s: float) -> Stillness | None:
    """The state after another look. None while the worker may be doing something."""
    if not (waits_in_collective(look.inside, world_size) and _is_asleep(look)):
        return None
    is_same = before is not None and _is_unchanged(before.look, look, now_s - before.since_s)
    return replace(before, until_s=now_s) if before and is_same else Stillness(now_s, now_s, look)


def waits_in_vain(state: Stillness | None) -> bool:
    """Whether two looks have found it waiting in vain. It may get the error in which its collective is to end."""
    return state is not None and state.until_s > state.since_s


def is_stuck(state: Stillness | None) -> bool:
    """Whether it has waited in vain for long enough."""
    if state is None:
        return False
    return state.until_s - state.since_s >= (STUCK_COUNTED_S if state.look.outside.ran_ns else STUCK_S)


def _is_asleep(look: SurvivorLook) -> bool:
    outside = look.outside
    main, _ = outside.calls.get(outside.main, ("", ""))
    return (
        main == _MAIN_WAITS_IN
        and all(call in _WAITS_IN for call, _ in _others_calls(look).values())
        and all(pid == look.inside.tracker or name == _LOADER for pid, name in outside.children.items())
        and not outside.is_pending
    )


def _others_calls(look: SurvivorLook) -> dict[int, tuple[str, str]]:
    """The system calls of all threads but the one that answers and gloo's."""
    return {tid: call for tid, call in look.outside.calls.items() if tid not in _awake(look)}


def _others_ran_ns(look: SurvivorLook) -> int:
    return sum(ran_ns for tid, ran_ns in look.outside.ran_ns.items() if tid not in _awake(look))


def _awake(look: SurvivorLook) -> frozenset[int]:
    """The threads that may be awake in a survivor that waits in vain."""
    return look.inside.loops | {look.inside.answers}


def _is_unchanged(first: SurvivorLook, now: SurvivorLook, meanwhile_s: float) -> bool:
    before, after_it = first.outside, now.outside
    ran_ns = _others_ran_ns(now) - _others_ran_ns(first)
    return (
        first.inside == now.inside
        and (_others_calls(first), before.written_bytes) == (_others_calls(now), after_it.written_bytes)
        and before.children == after_it.children
        and (
            ran_ns <= _RAN_NS_MAX + _RAN_SHARE_MAX * meanwhile_s * 1e9
            if after_it.ran_ns
            else after_it.cpu_s - before.cpu_s <= _CPU_S_MAX
        )
    )


def _is_idle(frames: tuple[Frame, ...]) -> bool:
    """Whether that thread only waits for work that nobody gives it now."""
    if only_listens([frame.file for frame in frames]):
        return True
    for frame in frames:
        if (frame.function, frame.short_file) in _IDLE_IN:
            return True
        if frame.short_file not in _WAITS:
            return False
    return False


def _frame(call: Any) -> Frame:
    function, file = call
    return Frame(str(function), str(file), 0)
