"""A connection to one of several addresses, some of which are silent or refuse; all on loopback."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from elaunch.rendezvous.dial import Deadline, HostAddress, NoResponse, dial, resolve
from tests.descriptors import opened
from tests.harness import DEADLINE_S, wait_for

# The kernel's numbers of a requested connection without response, and of a listener (net/tcp_states.h).
SYN_SENT, LISTEN = "02", "0A"
# A broadcast address is none for a connection: refused by this kernel itself, at once.
NOWHERE: HostAddress = (socket.AF_INET, ("255.255.255.255", 9))


class Listener:
    """A listener on loopback, at an address of its own."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.socket = socket.create_server((host, 0), backlog=0)
        self.address: HostAddress = (socket.AF_INET, self.socket.getsockname())
        self._waiting: list[socket.socket] = []

    def fall_silent(self) -> None:
        """Have as many waiting as it takes; the kernel drops what comes now."""
        self._waiting.append(socket.create_connection(self.address[1]))
        wait_for(lambda: any(int(queues.partition(":")[2], 16) for queues in self._rows(1, LISTEN)), "one waits")

    def connecting(self) -> int:
        """How many connections are requested and have no response."""
        return len(self._rows(2, SYN_SENT))

    def wake(self) -> None:
        """Accept those that wait, so that the next is accepted."""
        for _ in self._waiting:
            self.socket.accept()[0].close()

    def close(self) -> None:
        for each in (self.socket, *self._waiting):
            each.close()

    def _rows(self, column: int, state: str) -> list[str]:
        """The queues, sent and received, of all sockets in that state that have this port in that column."""
        port = f":{self.address[1][1]:04X}"
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
        return [row[4] for row in rows if row[column].endswith(port) and row[3] == state]


@pytest.fixture
def listeners() -> Iterator[list[Listener]]:
    with ExitStack() as stack:
        made = [Listener(), Listener()]
        for each in made:
            stack.callback(each.close)
        yield made


@pytest.fixture
def refusing() -> Iterator[list[HostAddress]]:
    """Reserved ports without a listener."""
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        yield [(socket.AF_INET, each.getsockname()) for each in (one, other)]


def test_who_listens_is_connected(listeners: list[Listener]) -> None:
    with dial([listeners[0].address], Deadline(DEADLINE_S).left) as connected:
        assert connected.getpeername() == listeners[0].address[1]
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_silent_one_does_not_keep_from_the_next(listeners: list[Listener]) -> None:
    silent, other = listeners
    silent.fall_silent()
    before = opened()

    with dial([silent.address, other.address], Deadline(0.5).left) as connected:
        assert connected.getpeername() == other.address[1]

    assert not opened() - before


def test_an_address_that_is_silent_for_a_moment_is_retried(listeners: list[Listener]) -> None:
    silent = listeners[0]
    silent.fall_silent()
    with ThreadPoolExecutor() as pool:
        dialled = pool.submit(dial, [silent.address], Deadline(DEADLINE_S).left)
        wait_for(lambda: silent.connecting() == 1, "it is dialled")

        silent.wake()

        with dialled.result(DEADLINE_S) as connected:
            assert connected.getpeername() == silent.address[1]


def test_no_address_is_waited_for_beyond_the_deadline(listeners: list[Listener]) -> None:
    listeners[0].fall_silent()
    before = opened()

    # The error keeps what was open then.
    with pytest.raises(TimeoutError) as caught:
        dial([listeners[0].address], Deadline(0.5).left)

    assert isinstance(caught.value, NoResponse)
    assert str(caught.value) == "timed out"
    assert not opened() - before
    assert not listeners[0].connecting()


def test_a_refusal_at_one_address_is_a_refusal_of_the_host(
    listeners: list[Listener], refusing: list[HostAddress]
) -> None:
    listeners[0].fall_silent()

    for addresses in ([*refusing, listeners[0].address], [NOWHERE, *refusing]):
        with pytest.raises(ConnectionRefusedError):
            dial(addresses, Deadline(0.5).left)


def test_an_error_of_this_host_is_not_hidden_by_silence_nor_by_ipv6_that_it_does_not_have(
    listeners: list[Listener],
) -> None:
    listeners[0].fall_silent()
    # The kernel has no route for TCP to a multicast address: as to every IPv6 address on a host without IPv6.
    no_ipv6: HostAddress = (socket.AF_INET6, ("ff02::1", 9, 0, 0))

    # No kernel has a stream socket of packets.
    own: HostAddress = (socket.AF_PACKET, ())

    for others in ([no_ipv6], [listeners[0].address], [NOWHERE]):
        with pytest.raises(OSError, match=r"Socket type not supported|not permitted"):
            dial([*others, own], Deadline(0.5).left)
    with pytest.raises(NoResponse):
        dial([no_ipv6, listeners[0].address], Deadline(0.5).left)


# Names.

REAL = socket.getaddrinfo


class Resolver:
    """Stands for the system's; it hangs while `answers` is not set."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.queries = 0

    def __call__(self, host: str, *args: Any, flags: int = 0, **kwargs: Any) -> Any:
        if flags & socket.AI_NUMERICHOST:
            return REAL(host, *args, flags=flags, **kwargs)
        self.queries += 1
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
    assert resolver.queries == 0


def test_a_resolver_that_hangs_is_queried_once_and_waited_for_until_the_limit(resolver: Resolver) -> None:
    for _ in range(3):
        with pytest.raises(socket.gaierror, match="no response from the resolver within"):
            resolve("hangs.test", 1, 0.01)
    wait_for(lambda: resolver.queries, "the query")
    assert resolver.queries == 1

    resolver.answers.set()

    assert wait_for(lambda: resolve("hangs.test", 1, 1), "the answer") == [(socket.AF_INET, ("127.0.0.1", 1))]


def test_what_was_known_is_used_while_the_resolver_hangs(resolver: Resolver) -> None:
    resolver.answers.set()
    known = resolve("known.test", 1, 10)
    resolver.answers.clear()

    assert resolve("known.test", 1, 0.01) == known
