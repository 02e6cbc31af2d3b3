"""Channels whose ranks are threads of the test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from elaunch.trainer.ranks.channel import Channel
from elaunch.trainer.ranks.handshake import Contact
from tests.harness import DEADLINE_S

Answer = TypeVar("Answer")
NAME = "test"


class Book:
    """A store in this process. All ranks are on this host, at `address`."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.address = address
        # How often a rank has found another one in it.
        self.found = 0
        self._said: dict[int, bytes] = {}
        self._changed = threading.Condition()

    def own_address(self) -> str:
        return self.address

    def publish(self, rank: int, content: bytes) -> None:
        with self._changed:
            self._said[rank] = content
            self._changed.notify_all()

    def find(self, rank: int) -> bytes | None:
        with self._changed:
            self.found += rank in self._said
            return self._said.get(rank)

    def contact(self, rank: int) -> Contact:
        with self._changed:
            assert self._changed.wait_for(lambda: rank in self._said, DEADLINE_S), f"rank {rank} does not listen"
            return Contact.from_bytes(NAME, rank, self._said[rank])


def channels(world_size: int, book: Book | None = None, timeout_s: float = DEADLINE_S) -> list[Channel]:
    book = book or Book()
    return [Channel(NAME, rank, world_size, book, timeout_s=timeout_s) for rank in range(world_size)]


def begin(
    pool: ThreadPoolExecutor, ranks: Sequence[Channel], call: Callable[[Channel, int], Answer]
) -> list[Future[Answer]]:
    """Call it on all ranks at the same time."""
    return [pool.submit(call, channel, rank) for rank, channel in enumerate(ranks)]


def on_all(ranks: Sequence[Channel], call: Callable[[Channel, int], Answer]) -> list[Answer]:
    """Call it on all ranks at the same time; the answers, by rank."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [each.result(DEADLINE_S) for each in begin(pool, ranks, call)]
