"""Connections that are not authenticated yet: their age, their address, and which one is closed first."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Generic, TypeVar

# The time from accept() until the first authenticated request is complete, whatever else the client sends.
FIRST_REQUEST_S = 20.0
PER_ADDRESS = 16
# An address may have more than `PER_ADDRESS` unauthenticated connections for this time. The agents of a job start
# together, and all may come from one address: behind a NAT, or in containers of one host. By default an agent's call
# waits for 2 s at most.
CROWD_S = 5.0

Client = TypeVar("Client")


class UnauthenticatedConnections(Generic[Client]):
    """All unauthenticated connections, by address and age. Times are on the caller's clock."""

    def __init__(self) -> None:
        self._came: dict[Client, tuple[str, float]] = {}
        # The connections of each address, the oldest first.
        self._from: dict[str, dict[Client, None]] = {}
        # The addresses by their number of connections, so that `first_to_go` takes constant time.
        self._with: dict[int, dict[str, None]] = {}
        self._most = 0

    def __len__(self) -> int:
        return len(self._came)

    def __contains__(self, who: Client) -> bool:
        return who in self._came

    def add(self, who: Client, address: str, since: float) -> None:
        self._came[who] = address, since
        its = self._from.setdefault(address, {})
        its[who] = None
        self._move(address, len(its) - 1, len(its))
        self._most = max(self._most, len(its))

    def discard(self, who: Client) -> None:
        """Forget a connection. An unknown one is no error."""
        if who not in self._came:
            return
        address, _ = self._came.pop(who)
        its = self._from[address]
        del its[who]
        self._move(address, len(its) + 1, len(its))
        if not its:
            del self._from[address]
        if self._most not in self._with:
            self._most -= 1

    def first_to_go(self) -> Client | None:
        """The oldest connection of the address that has the most, so that one address cannot push out the others."""
        if not self._came:
            return None
        return next(iter(self._from[next(iter(self._with[self._most]))]))

    def overdue(self, now_s: float) -> list[Client]:
        """The connections whose time is over: `CROWD_S` for those beyond `PER_ADDRESS`, `FIRST_REQUEST_S` for all."""
        return [who for its in self._from.values() for who in self._overdue(its, now_s)]

    def crowds(self, count_max: int = 3) -> list[tuple[str, int]]:
        """The addresses with the most connections, and how many each has."""
        by_count = ((count, address) for count in sorted(self._with, reverse=True) for address in self._with[count])
        return [(address, count) for count, address in islice(by_count, count_max)]

    def _overdue(self, its: Iterable[Client], now_s: float) -> Iterable[Client]:
        its = list(its)
        beyond = len(its) - PER_ADDRESS
        for place, who in enumerate(its):
            age_s = now_s - self._came[who][1]
            if age_s >= (CROWD_S if place < beyond else FIRST_REQUEST_S):
                yield who

    def _move(self, address: str, old: int, new: int) -> None:
        if old:
            del self._with[old][address]
            if not self._with[old]:
                del self._with[old]
        if new:
            self._with.setdefault(new, {})[address] = None
