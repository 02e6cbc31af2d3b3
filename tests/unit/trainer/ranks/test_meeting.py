"""Ranks that connect: they try again where they are turned away, and no death goes unnoticed meanwhile."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from elaunch.trainer.ranks import connections
from elaunch.trainer.ranks.channel import Channel
from elaunch.trainer.ranks.connections import PeerLost
from elaunch.trainer.ranks.handshake import HELLO_BYTES, REPLY_BYTES, Contact
from tests.harness import DEADLINE_S, wait_for
from tests.relay import Listener, silent
from tests.unit.trainer.ranks.channels import NAME, Book, channels

REGION_BYTES = 64 << 20


def reset(connection: socket.socket) -> None:
    """Close it so that the other end gets a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def resets(client: socket.socket) -> None:
    client.recv(HELLO_BYTES)
    reset(client)


class Gate:
    """A way to rank 0 of `book` that lets nobody through at first: each connection gets the next of `refusals`."""

    def __init__(self, book: Book, *refusals: Callable[[socket.socket], None]) -> None:
        self._true, self._refusals = book.contact(0), list(refusals)
        self._listener = Listener(self._serve)
        book.publish(0, replace(self._true, address="127.0.0.1", port=self._listener.endpoint.port).to_bytes())

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.__exit__()

    @property
    def accepted(self) -> int:
        return self._listener.accepted

    def reach(self) -> socket.socket:
        return socket.create_connection((self._true.address, self._true.port), DEADLINE_S)

    def takes_the_reply(self, client: socket.socket) -> None:
        """Rank 0 hears the hello and answers, but its answer does not arrive."""
        with self.reach() as server:
            server.sendall(client.recv(HELLO_BYTES))
            assert server.recv(REPLY_BYTES)
            reset(client)

    def _serve(self, client: socket.socket) -> None:
        if self._refusals:
            self._refusals.pop(0)(client)
            return
        with self.reach() as server:
            server.sendall(client.recv(HELLO_BYTES))
            client.sendall(server.recv(REPLY_BYTES))
            back = threading.Thread(target=copy, args=(server, client), daemon=True)
            back.start()
            copy(client, server)
            back.join(DEADLINE_S)


def copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@contextmanager
def called(*calls: Callable[[], object]) -> Iterator[list[Future[object]]]:
    with ThreadPoolExecutor(len(calls)) as pool:
        yield [pool.submit(call) for call in calls]


def listens(channel: Channel) -> None:
    """The rank says where it listens, and does not wait for anybody."""
    channel._connections._listen()


@pytest.mark.parametrize("kind", ["closed", "reset", "reply lost"])
def test_a_rank_that_is_turned_away_tries_again(kind: str) -> None:
    book = Book()
    ranks = channels(2, book)
    listens(ranks[0])
    refusals: dict[str, Callable[[socket.socket], None]] = {
        "closed": lambda client: None,
        "reset": resets,
        "reply lost": lambda client: gate.takes_the_reply(client),
    }
    with Gate(book, *[refusals[kind]] * 2) as gate:
        with called(lambda: ranks[0].largest([0]), lambda: ranks[1].largest([1])) as found:
            assert [each.result(DEADLINE_S) for each in found] == [[1], [1]]

        assert gate.accepted == 3
        for channel in ranks:
            channel.close()


def test_a_rank_that_is_turned_away_for_too_long_says_by_whom_and_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "_TRIES_S", 3.0)
    with Listener(resets) as turning_away:
        book = Book()
        port = turning_away.endpoint.port
        book.publish(0, Contact(NAME, 0, "127.0.0.1", port, b"s" * 32).to_bytes())

        with pytest.raises(PeerLost) as raised:
            channels(2, book)[1].largest([1])

    assert turning_away.accepted > 2
    assert str(raised.value) == (
        "rank 0 is gone or has failed: connection closed by peer (Connection reset by peer, at 127.0.0.1 "
        f"port {port}), channel {NAME}"
    )


def test_the_address_of_a_rank_before_a_restart_is_forgotten_when_the_new_one_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "_REREAD_S", 0.05)
    # One of them has nobody at its old port, the other one a process that never answers.
    with socket.create_server(("127.0.0.1", 0)) as closed, silent() as other:
        ports = [closed.getsockname()[1], other.endpoint.port]
    with silent() as other:
        for port in (ports[0], other.endpoint.port):
            book = Book()
            ranks = channels(2, book)
            old = Contact(NAME, 0, "127.0.0.1", port, b"s" * 32).to_bytes()
            book.publish(0, old)
            with called(lambda: ranks[1].largest([1])) as (joining,):  # noqa: B023
                wait_for(lambda: book.found > 1, "a second look at the store")  # noqa: B023
                assert not joining.done()

                assert ranks[0].largest([0]) == [1]
                assert joining.result(DEADLINE_S) == [1]


@pytest.mark.parametrize("has_come", [True, False], ids=["is busy", "is not there yet"])
def test_a_death_is_an_error_on_a_rank_that_still_waits_to_meet_another_one(
    has_come: bool,
) -> None:
    """Rank 9 tells rank 8 its number, and dies. Rank 8 cannot tell rank 0, which does not come."""
    ranks = channels(10)
    if has_come:
        listens(ranks[0])
    with called(lambda: ranks[8].largest([8]), lambda: ranks[9].largest([9])) as (waits, dies):
        wait_for(lambda: 9 in ranks[8]._connections._connected, "rank 9 at rank 8")
        ranks[9]._connections._connected[8].socket.shutdown(socket.SHUT_RDWR)

        with pytest.raises(PeerLost, match="rank 9 is gone"):
            waits.result(DEADLINE_S / 2)
        with pytest.raises(PeerLost):
            dies.result(DEADLINE_S)
