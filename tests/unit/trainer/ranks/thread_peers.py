"""Ranks that are threads of the test."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from elaunch.trainer.ranks.connections import Connections
from elaunch.trainer.ranks.handshake import Contact
from elaunch.trainer.ranks.peers import Peers
from tests.harness import DEADLINE_S

Rank = TypeVar("Rank")
Result = TypeVar("Result")
NAME = "ranks"


class Book:
    """A store in this process. All ranks are on this host, at `address`."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.address = address
        # How often a rank has found another one in it.
        self.found = 0
        self.published: dict[int, bytes] = {}
        self._changed = threading.Condition()

    def own_address(self) -> str:
        return self.address

    def publish(self, rank: int, content: bytes) -> None:
        with self._changed:
            self.published[rank] = content
            self._changed.notify_all()

    def find(self, rank: int) -> bytes | None:
        with self._changed:
            self.found += rank in self.published
            return self.published.get(rank)

    def contact(self, rank: int) -> Contact:
        with self._changed:
            assert self._changed.wait_for(lambda: rank in self.published, DEADLINE_S), f"rank {rank} does not listen"
            return Contact.from_bytes(NAME, rank, self.published[rank])


class ThreadPeers(Peers):
    """One of several ranks of this process. `books` has a store for each of their purposes."""

    def __init__(self, rank: int, world_size: int, books: dict[str, Book], timeout_s: float = DEADLINE_S) -> None:
        super().__init__()
        self.rank, self.world_size, self.books, self.timeout_s = rank, world_size, books, timeout_s

    @property
    def connections(self) -> Connections:
        return self._connections

    def _open(self) -> Connections:
        book = self.books[self._purpose]
        return Connections(self._purpose, self.rank, self.world_size, book, timeout_s=self.timeout_s)


def thread_peers(world_size: int, book: Book | None = None, timeout_s: float = DEADLINE_S) -> list[ThreadPeers]:
    """All ranks. `book` is the store of all but those that are `apart`."""
    books = defaultdict(Book, {NAME: book or Book()})
    return [ThreadPeers(rank, world_size, books, timeout_s) for rank in range(world_size)]


def begin(pool: ThreadPoolExecutor, ranks: Sequence[Rank], call: Callable[[Rank], Result]) -> list[Future[Result]]:
    """Call it on all ranks at the same time."""
    return [pool.submit(call, rank) for rank in ranks]


def on_all(ranks: Sequence[Rank], call: Callable[[Rank], Result]) -> list[Result]:
    """Call it on all ranks at the same time; the results, by rank."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [each.result(DEADLINE_S) for each in begin(pool, ranks, call)]
