"""How many connections a served store may hold: those of its agents, and unauthenticated ones."""

from __future__ import annotations

# One for calls, one for the watch, and one for an overlap: the next watch, or a read by the watch itself.
CONNECTIONS_PER_AGENT = 3
# Descriptors of the server itself: listeners, selector, pipes to its parent, a source file for a traceback.
OWN_DESCRIPTORS = 16
# A limit of memory, for hosts without a limit of descriptors. A job with more agents gets more slots.
CONNECTIONS_MAX = 16_384


def slots_for(agents: int) -> int:
    """The slots that so many agents need: three for each agent, and one more for an unauthenticated connection."""
    return (CONNECTIONS_PER_AGENT + 1) * agents


def slots(descriptors: int, agents: int = 0) -> int:
    """How many connections may be open, given the limit of open files; `agents` is 0 if their number is unknown."""
    return max(min(descriptors - OWN_DESCRIPTORS, max(CONNECTIONS_MAX, slots_for(agents))), 1)


def unauthenticated_max(slots: int, known: int) -> int:
    """How many unauthenticated connections may be open: a quarter of all slots, if `known` ones leave that many."""
    return min(max(slots // 4, 1), slots - known)
