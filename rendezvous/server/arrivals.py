"""Connections whose first data waits to be read: which one is next, and which address keeps the others waiting.

The first data of a connection costs a TLS handshake: a quarter of a millisecond of the server's only thread, ten times
what it costs to accept. Whoever opens many connections makes only its own wait: the addresses take turns.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Generic, TypeVar

# Half of the time for which an agent's call waits by default. Once the oldest connection of an address has waited for
# this long, the newest one is next: whoever opened the old ones has given up by the time of their turn.
LATE_S = 1.0
# An agent's call waits for this long by default. Handshakes that are later keep agents out, and are said.
LAG_S = 2.0
WAY_OUT = "if it is none of the job's hosts, keep it out with a firewall, or give the job another --rdzv-endpoint"

Client = TypeVar("Client")


class Arrivals(Generic[Client]):
    """All connections whose first data waits to be read. Times are on the caller's clock."""

    def __init__(self) -> None:
        self._address: dict[Client, str] = {}
        # When each one's data was seen, the oldest first, for each address. The addresses stand in the order of their
        # turns.
        self._from: OrderedDict[str, OrderedDict[Client, float]] = OrderedDict()
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._address)

    def __contains__(self, who: Client) -> bool:
        return who in self._address

    def add(self, who: Client, address: str, now_s: float) -> None:
        self._address[who] = address
        self._from.setdefault(address, OrderedDict())[who] = now_s
        self._counts[address] += 1

    def discard(self, who: Client) -> None:
        """Forget a connection. An unknown one is no error."""
        address = self._address.pop(who, None)
        if address is not None:
            its = self._from[address]
            del its[who]
            if not its:
                del self._from[address]

    def next(self, now_s: float) -> Client:
        """Take the next connection of the address whose turn it is. There must be one."""
        address, its = next(iter(self._from.items()))
        self._from.move_to_end(address)
        oldest, since_s = next(iter(its.items()))
        who = oldest if now_s - since_s < LATE_S else next(reversed(its))
        self.discard(who)
        return who

    def shown(self, address: str) -> None:
        """A connection of `address` has shown the token."""
        self._counts[address] -= 1

    def tell_lag(self, now_s: float, interval_s: float) -> str | None:
        """A sentence if handshakes are late. Call it every `interval_s`: it counts connections since its last call."""
        counts, self._counts = self._counts, Counter()
        late_s = max((now_s - next(iter(its.values())) for its in self._from.values()), default=0.0)
        address = max(counts, key=counts.__getitem__, default="")
        if late_s < LAG_S or counts[address] <= 0:
            return None
        return (
            f"TLS handshakes are up to {late_s:.1f} s late, so agents may not get in: {len(self)} connections wait for"
            f" theirs; {address} opens the most, {counts[address] / interval_s:.0f} a second without the job's token;"
            f" {WAY_OUT}"
        )
