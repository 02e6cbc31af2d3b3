"""Ranks whose programs have ended while their processes live on: what keeps each, in words; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elaunch.agent.core.stack_groups import Stack, ranks_words
from elaunch.agent.core.waits import Doing, does_where, doing, thread_words
from elaunch.rendezvous.texts import listed

_SHOWN = 4


def lingering_words(
    stacks: Sequence[Stack], threads: Mapping[int, Sequence[str]], host: str, for_s: float, job: str
) -> tuple[str, ...]:
    """Lines for the log. `threads` are each rank's threads that are no daemons, as it reported at its program's end.

    The programs ended `for_s` ago or earlier. `job` is what a user types for the job.
    """
    found: dict[str, list[Stack]] = {}
    for stack in stacks:
        found.setdefault(_kept_by(stack, threads.get(stack.rank, ())), []).append(stack)
    lines = [
        f"the program of {ranks_words([each.rank for each in group])} ({_pids(group)} on {host}) ended at least"
        f" {for_s:.0f} s ago, but {'its process has' if len(group) == 1 else 'their processes have'} not exited: {why}"
        for why, group in found.items()
    ]
    return (*lines, f"to end the job now: elaunch stop {job}") if lines else ()


def _pids(group: Sequence[Stack]) -> str:
    pids = [str(stack.pid) for stack in group]
    return f"pid{'s' if len(pids) > 1 else ''} {', '.join(pids[:_SHOWN])}{', …' if len(pids) > _SHOWN else ''}"


def _kept_by(stack: Stack, names: Sequence[str]) -> str:
    main = stack.main
    if main is None:
        kept = [f"{name!r}" for name in names]
    elif doing(stack) is Doing.END:
        others = [thread for thread in stack.threads if not thread.is_main and not thread.is_own]
        # Those that the program started at its very end have not been reported.
        kept = [thread_words(thread) for thread in others if thread.name in names] or [*map(thread_words, others)]
    else:
        kept = []
    if kept:
        words = f"Python waits for its thread{'s' if len(kept) > 1 else ''} {_some(kept)}"
        return f"{words}; a thread with daemon=True is not waited for"
    if main is None or not main.frames:
        has_left = stack.trouble.startswith("it runs no Python")
        trouble = "an exit function or destructor of C or C++ has not returned" if has_left else stack.trouble
        return trouble or "it runs no Python any more"
    children = [f"{child.pid}, which {does_where(child)}" for child in stack.children]
    waits = f"; its child process{'es are' if len(children) > 1 else ' is'} {_some(children)}" if children else ""
    return f"it {does_where(stack)}{waits}"


def _some(items: Sequence[str]) -> str:
    more = len(items) - _SHOWN
    return listed([*items[:_SHOWN], *([f"{more} more"] if more > 0 else [])])
