"""rendezvous.http.resolve keeps its deadline, whatever the system's resolver does."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from elaunch.rendezvous.http.resolve import resolve
from tests.harness import DEADLINE_S, wait_for

REAL = socket.getaddrinfo


class Resolver:
    """Stands for the system's; it hangs while `answers` is not set."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.asked = 0

    def __call__(self, host: str, *args: Any, flags: int = 0, **kwargs: Any) -> Any:
        if flags & socket.AI_NUMERICHOST:
            return REAL(host, *args, flags=flags, **kwargs)
        self.asked += 1
        self.answers.wait(DEADLINE_S)
        return REAL("127.0.0.1", *args, flags=flags, **kwargs)


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    resolver = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    yield resolver
    resolver.answers.set()


def test_addresses_need_no_resolver(resolver: Resolver) -> None:
    assert resolve("127.0.0.1", 1, 0) == [(socket.AF_INET, ("127.0.0.1", 1))]
    assert resolve("::1", 1, 0) == [(socket.AF_INET6, ("::1", 1, 0, 0))]
    assert resolver.asked == 0


def test_a_resolver_that_hangs_is_waited_for_no_longer_than_said_and_asked_once(resolver: Resolver) -> None:
    for _ in range(3):
        with pytest.raises(socket.gaierror, match="no word from the resolver within"):
            resolve("hangs.test", 1, 0.01)
    wait_for(lambda: resolver.asked, "the question")
    assert resolver.asked == 1

    resolver.answers.set()

    assert wait_for(lambda: resolve("hangs.test", 1, 1), "the answer") == [(socket.AF_INET, ("127.0.0.1", 1))]


def test_what_was_known_is_used_while_the_resolver_hangs(resolver: Resolver) -> None:
    resolver.answers.set()
    known = resolve("known.test", 1, 10)
    resolver.answers.clear()

    assert resolve("known.test", 1, 0.01) == known
