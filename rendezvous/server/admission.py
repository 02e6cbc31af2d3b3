"""Admission of unauthenticated connections to a served store: how many, for how long, and whose turn it is.

The first data of a connection costs a TLS handshake: a quarter of a millisecond of the server's only thread, ten times
what it costs to accept. An address that opens many connections delays only its own: addresses are served round-robin.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Generic, TypeVar

# The time from accept() until the first authenticated request is complete, whatever else the client sends.
FIRST_REQUEST_S = 20.0
PER_ADDRESS = 16
# An address may have more than `PER_ADDRESS` unauthenticated connections for this time. The agents of a job start
# together, and all may come from one address: behind a NAT, or in containers of one host. By default an agent's call
# waits for 2 s at most.
CROWD_S = 5.0
# Half of the time for which an agent's call waits by default. Once the oldest connection of an address has waited for
# this long, the newest one is next: the clients of the old ones have given up by the time of their turn.
LATE_S = 1.0
# An agent's call waits for this long by default. Handshakes that are later keep agents out, and are logged.
LAG_S = 2.0
WAY_OUT = "if it is none of the job's hosts, keep it out with a firewall, or give the job another --rdzv-endpoint"

# One for calls, one for the watch, and one for an overlap: the next watch, or a read by the watch itself.
CONNECTIONS_PER_AGENT = 3
# Descriptors of the server itself: listeners, selector, pipes to its parent, a source file for a traceback.
OWN_DESCRIPTORS = 16
# A limit of memory, for hosts without a limit of descriptors. A job with more agents gets more slots.
CONNECTIONS_MAX = 16_384

Client = TypeVar("Client")


class Unauthenticated(Generic[Client]):
    """All unauthenticated connections, by address. Times are on the caller's clock."""

    def __init__(self) -> None:
        self._accepted: dict[Client, tuple[str, float]] = {}
        # The connections of each address, the oldest first.
        self._from: dict[str, dict[Client, None]] = {}
        # Those whose first data waits to be read, and since when. The addresses are in the order of their turns.
        self._arrived: OrderedDict[str, OrderedDict[Client, float]] = OrderedDict()
        # How many have arrived since the last `lag_report`, without those that have shown the token.
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._accepted)

    def add(self, who: Client, address: str, now_s: float) -> None:
        self._accepted[who] = address, now_s
        self._from.setdefault(address, {})[who] = None

    def discard(self, who: Client) -> None:
        """Forget a connection. An unknown one is no error."""
        if who not in self._accepted:
            return
        self._forget_arrival(who)
        address, _ = self._accepted.pop(who)
        del self._from[address][who]
        if not self._from[address]:
            del self._from[address]

    def shown(self, who: Client) -> None:
        """Forget a connection that has shown the token, and do not count it."""
        if who in self._accepted:
            self._counts[self._accepted[who][0]] -= 1
            self.discard(who)

    def first_to_go(self) -> Client | None:
        """The oldest connection of the address that has the most, so that one address cannot push out the others."""
        most = max(self._from.values(), key=len, default=None)
        return next(iter(most)) if most else None

    def crowds(self, count_max: int = 3) -> list[tuple[str, int]]:
        """The addresses with the most connections, and how many each has."""
        return Counter({address: len(its) for address, its in self._from.items()}).most_common(count_max)

    def overdue(self, now_s: float) -> list[Client]:
        """The connections past their deadline: `CROWD_S` for those beyond `PER_ADDRESS`, `FIRST_REQUEST_S` for all."""
        return [
            who
            for its in self._from.values()
            for place, who in enumerate(its)
            if now_s - self._accepted[who][1] >= (CROWD_S if place < len(its) - PER_ADDRESS else FIRST_REQUEST_S)
        ]

    @property
    def has_arrivals(self) -> bool:
        return bool(self._arrived)

    def arrive(self, who: Client, now_s: float) -> None:
        """Queue a connection whose first data waits to be read."""
        address, _ = self._accepted[who]
        self._arrived.setdefault(address, OrderedDict())[who] = now_s
        self._counts[address] += 1

    def next_arrival(self, now_s: float) -> Client:
        """Take the next arrival of the address whose turn it is. There must be one."""
        address, its = next(iter(self._arrived.items()))
        self._arrived.move_to_end(address)
        oldest, since_s = next(iter(its.items()))
        who = oldest if now_s - since_s < LATE_S else next(reversed(its))
        self._forget_arrival(who)
        return who

    def lag_report(self, now_s: float, interval_s: float) -> str | None:
        """A sentence if handshakes are late. Call it every `interval_s`: it counts connections since its last call."""
        counts, self._counts = self._counts, Counter()
        late_s = max((now_s - next(iter(its.values())) for its in self._arrived.values()), default=0.0)
        address = max(counts, key=counts.__getitem__, default="")
        if late_s < LAG_S or counts[address] <= 0:
            return None
        waiting = sum(map(len, self._arrived.values()))
        return (
            f"TLS handshakes are up to {late_s:.1f} s late, so agents may not get in: {waiting} connections wait for"
            f" theirs; {address} opens the most, {counts[address] / interval_s:.0f} a second without the job's token;"
            f" {WAY_OUT}"
        )

    def _forget_arrival(self, who: Client) -> None:
        address, _ = self._accepted[who]
        if its := self._arrived.get(address):
            its.pop(who, None)
            if not its:
                del self._arrived[address]


def slots_for(agents: int) -> int:
    """The slots that this many agents need: three for each agent, and one more for an unauthenticated connection."""
    return (CONNECTIONS_PER_AGENT + 1) * agents


def slots(descriptors: int, agents: int = 0) -> int:
    """How many connections may be open, given the limit of open files; `agents` is 0 if their number is unknown."""
    return max(min(descriptors - OWN_DESCRIPTORS, max(CONNECTIONS_MAX, slots_for(agents))), 1)


def unauthenticated_max(slots: int, known: int) -> int:
    """How many unauthenticated connections may be open: a quarter of all slots, if `known` ones leave that many."""
    return min(max(slots // 4, 1), slots - known)
