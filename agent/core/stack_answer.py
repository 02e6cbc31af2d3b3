"""The stacks of a node's workers as an answer of limited size, and the answers of all nodes as one list; pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from elaunch.agent.core.stack_groups import Stack, StackGroup, grouped
from elaunch.rendezvous.codec import decode, encode
from elaunch.rendezvous.rules.questions import ANSWER_BYTES_MAX
from elaunch.rendezvous.rules.reports import RANKS_MAX

_TOO_LONG = "its stacks are too long to show"


@dataclass(frozen=True)
class StackAnswer:
    """The workers of one node in its newest generation: ranks with equal stacks once."""

    node_id: str
    generation: int
    groups: tuple[StackGroup, ...]


def stack_answer(node_id: str, generation: int, stacks: Iterable[Stack]) -> str:
    """The answer as JSON. If it is too large, it has no child processes, then main threads only, then no stacks."""
    groups = grouped(stacks)
    for shorten in (lambda stack: stack, _without_children, _of_main_thread, _without_threads):
        text = encode(StackAnswer(node_id, generation, _each(groups, shorten)))
        if len(text) <= ANSWER_BYTES_MAX:
            return text
    return encode(StackAnswer(node_id, generation, ()))


def read_stack_answer(text: str, node_id: str) -> StackAnswer | None:
    """That node's answer; None if the text is none."""
    try:
        answer = decode(StackAnswer, text)
    except ValueError:
        return None
    return (
        answer if answer.node_id == node_id and sum(len(group.ranks) for group in answer.groups) <= RANKS_MAX else None
    )


def stacks_in(answers: Iterable[StackAnswer]) -> tuple[Stack, ...]:
    """The stack of each rank; ranks that were in one group have the same one."""
    return tuple(
        replace(group.stack, rank=rank) for answer in answers for group in answer.groups for rank in group.ranks
    )


def _each(groups: tuple[StackGroup, ...], shorten: Callable[[Stack], Stack]) -> tuple[StackGroup, ...]:
    return tuple(replace(group, stack=shorten(group.stack)) for group in groups)


def _without_children(stack: Stack) -> Stack:
    return replace(stack, children=())


def _of_main_thread(stack: Stack) -> Stack:
    return replace(stack, threads=(stack.main,) if stack.main else stack.threads[:1], children=())


def _without_threads(stack: Stack) -> Stack:
    return replace(stack, threads=(), children=(), trouble=stack.trouble or _TOO_LONG)
