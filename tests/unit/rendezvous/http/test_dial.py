"""A connection to one of several addresses, some of which are silent or refuse; all on loopback."""

from __future__ import annotations

import errno
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from elaunch.rendezvous.http.client import Deadline
from elaunch.rendezvous.http.dial import NoAnswer, dial
from elaunch.rendezvous.http.resolve import HostAddress
from tests.descriptors import opened
from tests.harness import DEADLINE_S, wait_for

# The kernel's numbers of a connection that is asked for and not answered, and of who listens (net/tcp_states.h).
SYN_SENT, LISTEN = "02", "0A"
# A broadcast address is none for a connection: refused by this kernel itself, at once.
NOWHERE: HostAddress = (socket.AF_INET, ("255.255.255.255", 9))


class Listener:
    """Somebody who listens on loopback, at an address of its own."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.socket = socket.create_server((host, 0), backlog=0)
        self.address: HostAddress = (socket.AF_INET, self.socket.getsockname())
        self._waiting: list[socket.socket] = []

    def fall_silent(self) -> None:
        """Have as many waiting as it takes; the kernel drops what comes now."""
        self._waiting.append(socket.create_connection(self.address[1]))
        wait_for(lambda: any(int(queues.partition(":")[2], 16) for queues in self._rows(1, LISTEN)), "one waits")

    def asking(self) -> int:
        """How many ask for a connection and are not answered."""
        return len(self._rows(2, SYN_SENT))

    def wake(self) -> None:
        """Take those who wait, so that the next is answered."""
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
    """Ports that are nobody else's, and where nobody listens."""
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        yield [(socket.AF_INET, each.getsockname()) for each in (one, other)]


def test_who_listens_is_connected(listeners: list[Listener]) -> None:
    with dial([listeners[0].address], Deadline(DEADLINE_S).left) as connected:
        assert connected.getpeername() == listeners[0].address[1]
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_after_one_that_refuses_and_one_that_is_not_to_be_reached_the_next_is_taken(
    listeners: list[Listener], refusing: list[HostAddress]
) -> None:
    with dial([*refusing, NOWHERE, listeners[0].address], Deadline(DEADLINE_S).left) as connected:
        assert connected.getpeername() == listeners[0].address[1]


def test_when_all_refuse_the_first_ones_error_is_told(refusing: list[HostAddress]) -> None:
    before = opened()

    with pytest.raises(ConnectionRefusedError) as caught:
        dial([*refusing, NOWHERE], Deadline(DEADLINE_S).left)

    assert caught.value.errno == errno.ECONNREFUSED
    assert not opened() - before


def test_a_refusal_is_also_one_of_what_the_host_did_not_hear_before(listeners: list[Listener]) -> None:
    silent, polls = listeners[0], Counter[str]()

    def left() -> float:
        polls["begun"] += 1
        return DEADLINE_S

    silent.fall_silent()
    with ThreadPoolExecutor() as pool:
        dialled = pool.submit(dial, [silent.address], left)
        wait_for(lambda: silent.asking() == 1, "it is asked")
        silent.close()
        begun = polls["begun"]

        with pytest.raises(ConnectionRefusedError):
            dialled.result(DEADLINE_S)

    assert polls["begun"] <= begun + 1, "the kernel's repetition of the first was waited for"


def test_a_silent_one_does_not_keep_from_the_next(listeners: list[Listener]) -> None:
    silent, other = listeners
    silent.fall_silent()
    before = opened()

    with dial([silent.address, other.address], Deadline(DEADLINE_S).left) as connected:
        assert connected.getpeername() == other.address[1]

    assert not opened() - before


def test_who_is_silent_is_asked_again_by_another_socket(listeners: list[Listener]) -> None:
    silent, other = listeners
    silent.fall_silent()
    other.fall_silent()
    with ThreadPoolExecutor() as pool:
        dialled = pool.submit(dial, [silent.address, other.address], Deadline(DEADLINE_S).left)
        # Each once more, beside the first tries.
        wait_for(lambda: min(each.asking() for each in listeners) >= 2, "both are asked twice")

        other.wake()

        with dialled.result(DEADLINE_S) as connected:
            assert connected.getpeername() == other.address[1]


def test_all_are_tried_however_little_time_there_is(listeners: list[Listener]) -> None:
    silent, other = Listener("0.0.0.0"), listeners[0]
    silent.fall_silent()
    everywhere: list[HostAddress] = [(socket.AF_INET, (f"127.0.0.{i}", silent.address[1][1])) for i in range(1, 31)]
    deadline = Deadline(DEADLINE_S)

    def left() -> float:
        return min(deadline.left(), 0.3)

    with closing(silent), dial([*everywhere, other.address], left) as connected:
        assert connected.getpeername() == other.address[1]


def test_nobody_is_waited_for_longer_than_there_is_time(listeners: list[Listener]) -> None:
    listeners[0].fall_silent()
    before = opened()

    # The error keeps what was open then.
    with pytest.raises(TimeoutError) as caught:
        dial([listeners[0].address], Deadline(0.5).left)

    assert isinstance(caught.value, NoAnswer)
    assert str(caught.value) == "timed out"
    assert not opened() - before
    assert not listeners[0].asking()


def test_a_host_that_refuses_at_one_address_has_answered(
    listeners: list[Listener], refusing: list[HostAddress]
) -> None:
    listeners[0].fall_silent()

    with pytest.raises(TimeoutError) as late:
        dial([*refusing, listeners[0].address], Deadline(0.5).left)
    with pytest.raises(ConnectionRefusedError):
        dial([NOWHERE, *refusing], Deadline(DEADLINE_S).left)

    assert not isinstance(late.value, NoAnswer)


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
    with pytest.raises(NoAnswer):
        dial([no_ipv6, listeners[0].address], Deadline(0.5).left)


def test_a_name_without_an_address_is_an_error() -> None:
    with pytest.raises(OSError, match="no address"):
        dial([], Deadline(DEADLINE_S).left)
