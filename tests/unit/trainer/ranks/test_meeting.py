"""Ranks that connect: they try again where they are turned away, and no death goes unnoticed meanwhile."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest

from elaunch.trainer.ranks import handshake
from elaunch.trainer.ranks.connections import PeerLost
from elaunch.trainer.ranks.handshake import Contact
from tests.harness import DEADLINE_S, wait_for
from tests.relay import Listener, silent
from tests.unit.trainer.ranks.thread_peers import NAME, Book, thread_peers


def resets(connection: socket.socket) -> None:
    """Close it so that the other end gets a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@contextmanager
def called(*calls: Callable[[], object]) -> Iterator[list[Future[object]]]:
    with ThreadPoolExecutor(len(calls)) as pool:
        yield [pool.submit(call) for call in calls]


@pytest.mark.parametrize("refuses", [lambda client: None, resets], ids=["closed", "reset"])
def test_a_rank_that_is_turned_away_tries_again(refuses: Callable[[socket.socket], None]) -> None:
    book = Book()
    ranks = thread_peers(2, book)
    with called(lambda: ranks[0].largest([0])) as (first,):
        true = book.contact(0)
        with Listener(refuses) as gate:
            book.publish(0, replace(true, port=gate.endpoint.port).to_bytes())
            with called(lambda: ranks[1].largest([1])) as (second,):
                wait_for(lambda: gate.accepted > 1, "a second try")
                assert not second.done()
                book.publish(0, true.to_bytes())

                assert [each.result(DEADLINE_S) for each in (first, second)] == [[1], [1]]


def test_the_address_of_a_rank_before_a_restart_is_forgotten_when_the_new_one_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is another process by now, which never answers."""
    monkeypatch.setattr(handshake, "ANSWER_S", 0.05)
    with silent() as other:
        book = Book()
        ranks = thread_peers(2, book)
        book.publish(0, Contact(NAME, 0, "127.0.0.1", other.endpoint.port, b"s" * 32).to_bytes())
        with called(lambda: ranks[1].largest([1])) as (joining,):
            wait_for(lambda: book.found > 1, "a second look at the store")
            assert not joining.done()

            assert ranks[0].largest([0]) == [1]
            assert joining.result(DEADLINE_S) == [1]


@pytest.mark.parametrize("has_come", [True, False], ids=["is busy", "is not there yet"])
def test_a_death_is_an_error_on_a_rank_that_still_waits_to_meet_another_one(
    has_come: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 9 sends its number to rank 8, and dies. Rank 8 cannot send it to rank 0, which does not come."""
    monkeypatch.setattr(handshake, "ANSWER_S", 0.5)
    ranks = thread_peers(10)
    if has_come:
        ranks[0].connections._listen()
    with called(lambda: ranks[8].largest([8]), lambda: ranks[9].largest([9])) as (waits, dies):
        met = {8: 9, 9: 8}
        wait_for(lambda: all(its in ranks[one].connections._connected for one, its in met.items()), "rank 9 at rank 8")
        ranks[9].connections._connected[8].shutdown(socket.SHUT_RDWR)

        with pytest.raises(PeerLost, match="rank 9 is gone"):
            waits.result(DEADLINE_S / 2)
        with pytest.raises(PeerLost):
            dies.result(DEADLINE_S)
