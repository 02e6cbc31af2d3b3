"""Who may connect to a rank, and where it listens."""

from __future__ import annotations

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from elaunch.trainer.ranks import connections
from elaunch.trainer.ranks.connections import PeerLost
from elaunch.trainer.ranks.greeting import HELLO_BYTES, Contact
from elaunch.trainer.ranks.own_address import own_address
from tests.harness import DEADLINE_S
from tests.unit.trainer.ranks.channels import Book, begin, channels, on_all

CONTACT = Contact("job/peers", 0, "10.0.0.1", 4711, b"s" * 32)


def test_a_contact_is_read_as_it_was_written() -> None:
    assert Contact.from_bytes("job/peers", 0, CONTACT.to_bytes()) == CONTACT
    six = replace(CONTACT, address="fd00::1")
    assert Contact.from_bytes("job/peers", 0, six.to_bytes()) == six


def test_only_who_knows_the_secret_the_channel_and_the_receiver_is_taken_for_a_rank() -> None:
    hello = CONTACT.hello(3)

    assert len(hello) == HELLO_BYTES
    assert CONTACT.sender_of(hello) == 3
    for other in (replace(CONTACT, secret=b"t" * 32), replace(CONTACT, channel="job/mirror"), replace(CONTACT, rank=1)):
        assert other.sender_of(hello) is None
    assert CONTACT.secret not in hello
    assert all(
        CONTACT.sender_of(hello[:at] + bytes([hello[at] ^ 1]) + hello[at + 1 :]) is None for at in range(len(hello))
    )
    assert CONTACT.reply(3) != CONTACT.reply(4)


def dial(book: Book, *words: bytes) -> socket.socket:
    contact = book.contact(0)
    made = socket.create_connection((contact.address, contact.port), DEADLINE_S)
    for word in words:
        made.sendall(word)
    return made


def test_strangers_are_closed_and_hold_no_rank_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_HELLO_S", 0.2)
    book = Book()
    ranks = channels(3, book)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(ranks[0].largest, [0])
        strangers = [dial(book), dial(book, b"half"), dial(book, b"GET / HTTP/1.1\r\nHost: " + b"x" * HELLO_BYTES)]
        # A rank that is there says hello to another rank.
        strangers.append(dial(book, replace(book.contact(0), rank=1).hello(2)))
        others = [pool.submit(ranks[rank].largest, [rank]) for rank in (1, 2)]

        assert [each.result(DEADLINE_S) for each in (first, *others)] == [[2]] * 3
        # Some of them were closed with what they had said unread.
        for stranger in strangers:
            stranger.settimeout(DEADLINE_S)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
            stranger.close()
        assert on_all(ranks, lambda channel, rank: channel.largest([rank])) == [[2]] * 3


def test_a_stranger_that_says_nothing_is_closed_while_the_rank_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_HELLO_S", 0.05)
    book = Book()
    ranks = channels(2, book)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ranks[0].largest, [0])
        with dial(book, b"half") as stranger:
            assert stranger.recv(1) == b""
        assert not first.done()

        assert ranks[1].largest([1]) == [1]
        assert first.result(DEADLINE_S) == [1]


def test_more_strangers_than_there_is_room_for_hold_no_rank_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_UNKNOWN_MAX", 4)
    book = Book()
    ranks = channels(2, book)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ranks[0].largest, [0])
        strangers = [dial(book) for _ in range(20)]

        assert ranks[1].largest([1]) == [1]
        assert first.result(DEADLINE_S) == [1]
    for stranger in strangers:
        stranger.close()


def test_a_hello_that_was_seen_on_the_way_is_of_no_use_a_second_time() -> None:
    book = Book()
    ranks = channels(3, book)
    on_all(ranks[:2], lambda channel, rank: channel.meet([1 - rank]))
    with dial(book, book.contact(0).hello(1)) as stranger, ThreadPoolExecutor(3) as pool:
        found = begin(pool, ranks, lambda channel, rank: channel.largest([rank]))

        assert [each.result(DEADLINE_S) for each in found] == [[2]] * 3
        stranger.settimeout(DEADLINE_S)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


def test_a_rank_believes_nobody_who_listens_at_a_dead_ranks_port() -> None:
    book = Book()
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        book.publish(0, Contact("", 0, "127.0.0.1", server.getsockname()[1], b"s" * 32).to_bytes())
        joining = pool.submit(channels(2, book)[1].broadcast, None)
        taken, _ = server.accept()
        with taken:
            taken.sendall(b"a pickle" * 20)

            with pytest.raises(PeerLost, match="is not rank 0 any more"):
                joining.result(DEADLINE_S)


def test_a_rank_that_has_gone_before_it_was_reached_is_an_error_at_once() -> None:
    book = Book()
    with socket.create_server(("127.0.0.1", 0)) as server:
        book.publish(0, Contact("", 0, "127.0.0.1", server.getsockname()[1], b"s" * 32).to_bytes())

    with pytest.raises(PeerLost, match="rank 0 is gone or has failed"):
        channels(2, book)[1].largest([1])


def test_the_highest_rank_listens_nowhere_and_one_that_everybody_has_reached_no_more() -> None:
    book = Book()
    ranks = channels(2, book)
    on_all(ranks, lambda channel, rank: channel.largest([rank]))

    assert list(book._said) == [0]
    with pytest.raises(ConnectionRefusedError):
        dial(book)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}, "127.0.0.1"),
        ({"MASTER_ADDR": "::1", "MASTER_PORT": "29500"}, "::1"),
        ({"GLOO_SOCKET_IFNAME": "lo,eth7", "MASTER_ADDR": "203.0.113.1"}, "127.0.0.1"),
    ],
)
def test_a_rank_listens_where_it_reaches_the_master_or_at_gloos_interface(
    environ: dict[str, str], expected: str
) -> None:
    found = own_address(environ)

    assert found == expected


def test_an_interface_without_an_address_is_said() -> None:
    with pytest.raises(OSError, match="GLOO_SOCKET_IFNAME is none0, and this host has no address"):
        own_address({"GLOO_SOCKET_IFNAME": "none0"})


def test_ranks_meet_over_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "::1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    book = Book()

    assert on_all(channels(3, book), lambda channel, rank: channel.largest([rank])) == [[2]] * 3
    assert book.contact(0).address == "::1"
