"""How many connections a served store may hold: what its agents need, and what strangers are left."""

from __future__ import annotations

# One for the calls, one for the watch, and one for what overlaps: the next watch, or what a watch reads itself.
CONNECTIONS_PER_AGENT = 3
# The server's own: the listeners, the selector, the pipes of its parent, a file that it prints a fault from.
OWN_DESCRIPTORS = 16
# Memory is bounded where descriptors are not; a job of more agents gets more.
CONNECTIONS_MAX = 16_384


def slots_for(agents: int) -> int:
    """How many connections must be possible for so many agents: beside each three a fourth may be a stranger's."""
    return (CONNECTIONS_PER_AGENT + 1) * agents


def agents_for(slots: int) -> int:
    return slots // (CONNECTIONS_PER_AGENT + 1)


def descriptors_for(agents: int) -> int:
    """The limit of open files that a server of so many agents needs."""
    return slots_for(agents) + OWN_DESCRIPTORS


def slots(descriptors: int, agents: int = 0) -> int:
    """How many connections may be open at a limit of open files; `agents` is 0 where nobody knows how many come."""
    return max(min(descriptors - OWN_DESCRIPTORS, max(CONNECTIONS_MAX, slots_for(agents))), 1)


def strangers_max(slots: int, known: int) -> int:
    """How many connections may be strangers: a quarter of all, and no more than the `known` ones leave."""
    return min(max(slots // 4, 1), slots - known)
