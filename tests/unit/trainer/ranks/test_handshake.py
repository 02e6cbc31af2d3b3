"""Who may connect to a rank, and where it listens."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from elaunch.trainer.ranks import connections, handshake
from elaunch.trainer.ranks.connections import Connections, PeerLost
from elaunch.trainer.ranks.handshake import (
    CHALLENGE_BYTES,
    PROOF_BYTES,
    RESPONSE_BYTES,
    Contact,
    StoreContacts,
    own_address,
)
from tests.harness import DEADLINE_S, wait_for
from tests.relay import Listener, silent
from tests.unit.trainer.ranks.thread_peers import NAME, Book, ThreadPeers, on_all, thread_peers

ESTABLISHED = 1
CHALLENGE, NUMBER = b"c" * CHALLENGE_BYTES, b"n" * CHALLENGE_BYTES
CONTACT = Contact("job/peers", 0, "10.0.0.1", 4711, b"s" * 32)


@pytest.mark.parametrize("given", ["", "5" * 32])
def test_under_elaunch_the_process_groups_store_does_not_have_the_secret(
    given: str, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELAUNCH_GENERATION_SECRET", given)
    contacts, content = StoreContacts("job/peers"), CONTACT.to_bytes()

    contacts.publish(0, content)

    stored: Any = dist.distributed_c10d._get_default_store().get("job/peers/0")
    assert (stored == content) == (given == "")
    assert (CONTACT.secret in stored) == (given == "")
    assert contacts.find(0) == content
    monkeypatch.setenv("ELAUNCH_GENERATION_SECRET", "6" * 32)
    assert contacts.find(0) != content


def test_only_who_knows_the_secret_the_channel_and_the_receiver_is_taken_for_a_rank() -> None:
    response = CONTACT.response(3, CHALLENGE, NUMBER)
    rank, proof = CONTACT.confirmation(CHALLENGE, response) or (-1, b"")

    assert (len(response), len(proof), rank) == (RESPONSE_BYTES, PROOF_BYTES, 3)
    for other in (replace(CONTACT, secret=b"t" * 32), replace(CONTACT, channel="job/mirror"), replace(CONTACT, rank=1)):
        assert other.confirmation(CHALLENGE, response) is None
    assert CONTACT.secret not in response + proof
    assert CONTACT.confirmation(NUMBER, response) is None
    for at in range(len(response)):
        changed = response[:at] + bytes([response[at] ^ 1]) + response[at + 1 :]
        assert CONTACT.confirmation(CHALLENGE, changed) is None


def dial(book: Book, content: bytes = b"") -> socket.socket:
    contact = book.contact(0)
    made = socket.create_connection((contact.address, contact.port), DEADLINE_S)
    made.sendall(content)
    return made


def listening(book: Book) -> Connections:
    """Rank 0 of two, which waits for nothing yet."""
    waiting = Connections(NAME, 0, 2, book)
    waiting._listen()
    return waiting


def test_while_a_rank_does_not_poll_the_kernel_holds_few_connections() -> None:
    book = Book()
    waiting = listening(book)
    with contextlib.ExitStack() as stack:
        stack.callback(waiting.close)
        others = [stack.enter_context(socket.socket()) for _ in range(200)]
        for each in others:
            each.setblocking(False)
            each.connect_ex((book.address, book.contact(0).port))
        # On loopback the kernel has responded by now, if it does: what it does not take waits for a second SYN.
        connected = [each for each in others if state(each) == ESTABLISHED]

        assert 1 <= len(connected) <= 70


def state(made: socket.socket) -> int:
    """As in Linux's tcp_states.h."""
    return made.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def is_closed(other: socket.socket) -> bool:
    """Whether the rank has closed the connection, and sent nothing but its challenge."""
    other.settimeout(DEADLINE_S)
    # A connection that was closed with unread bytes is reset.
    with other, contextlib.suppress(ConnectionResetError):
        return len(other.recv(CHALLENGE_BYTES + 1, socket.MSG_WAITALL)) <= CHALLENGE_BYTES
    return True


@contextlib.contextmanager
def rank_0_waits(world_size: int) -> Iterator[tuple[Book, list[ThreadPeers]]]:
    """Rank 0 waits in a collective for the others. They come at the end of the block, and all ranks get the result."""
    book = Book()
    ranks = thread_peers(world_size, book)
    with ThreadPoolExecutor(world_size) as pool:
        found = [pool.submit(ranks[0].all_reduce_max, [0])]
        yield book, ranks
        assert not found[0].done()
        found += [pool.submit(peers.all_reduce_max, [peers.rank]) for peers in ranks[1:]]
        assert [each.result(DEADLINE_S) for each in found] == [[world_size - 1]] * world_size


def test_unauthenticated_peers_are_closed_and_hold_no_rank_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "RESPONSE_S", 0.2)
    with rank_0_waits(3) as (book, ranks):
        others = [dial(book), dial(book, b"half"), dial(book, b"GET / HTTP/1.1\r\nHost: " + b"x" * RESPONSE_BYTES)]
        # A rank that is there responds to another rank.
        others.append(dial(book))
        challenge = others[-1].recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
        others[-1].sendall(replace(book.contact(0), rank=1).response(2, challenge, NUMBER))

    assert on_all(ranks, lambda peers: peers.all_reduce_max([peers.rank])) == [[2]] * 3
    assert all(map(is_closed, others))


def test_more_unauthenticated_peers_than_there_is_room_for_hold_no_rank_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PENDING_MAX", 4)
    with contextlib.ExitStack() as stack, rank_0_waits(2) as (book, _):
        for _ in range(20):
            stack.enter_context(dial(book))


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_unauthenticated_peers_that_take_the_last_file_descriptors_end_no_training() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        book = Book()
        rank_0 = listening(book)
        stack.callback(rank_0.close)
        others = [stack.enter_context(socket.socket()) for _ in range(8)]
        rank_1 = stack.enter_context(socket.socket())
        rank_1.settimeout(DEADLINE_S)
        # Earlier tests may have left any numbers in use.
        unused = itertools.islice((fd for fd in itertools.count() if not is_open(fd)), 3)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(unused) + 1, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))

        for each in (*others, rank_1):
            each.connect((book.address, book.contact(0).port))
        while not select.select([rank_1], [], [], 0)[0]:
            assert not rank_0._admit(rank_0._poll(None, 0.0))
        challenge = rank_1.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
        rank_1.sendall(book.contact(0).response(1, challenge, NUMBER))

        assert rank_0._admit(rank_0._poll(None, time.monotonic() + DEADLINE_S))
        assert list(rank_0._connected) == [1]


def test_a_rank_refuses_another_process_that_listens_at_a_dead_ranks_port() -> None:
    book = Book()
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        book.publish(0, replace(CONTACT, address="127.0.0.1", port=server.getsockname()[1]).to_bytes())
        server.settimeout(DEADLINE_S)
        joining = pool.submit(thread_peers(2, book, timeout_s=0.0)[1].broadcast, None)
        taken, _ = server.accept()
        with taken:
            taken.sendall(b"a pickle" * 20)

            with pytest.raises(PeerLost, match="is not rank 0 any more"):
                joining.result(DEADLINE_S)


def test_the_highest_rank_listens_nowhere_and_one_that_everybody_has_reached_no_more() -> None:
    book = Book()
    ranks = thread_peers(2, book)
    on_all(ranks, lambda peers: peers.all_reduce_max([peers.rank]))

    assert list(book.published) == [0]
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


def test_an_address_at_which_no_rank_can_listen_is_named_with_the_way_out() -> None:
    # It is for documentation, so no host has it.
    with pytest.raises(OSError, match=r"cannot listen at 2001:db8::1 .*; GLOO_SOCKET_IFNAME=… names"):
        thread_peers(2, Book("2001:db8::1"))[0].all_reduce_max([0])


def test_a_port_that_a_firewall_closes_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_NO_ROUTE_S", 0.0)
    book = Book()
    book.publish(0, replace(CONTACT, address="127.0.0.1").to_bytes())

    def bars(*_: object) -> None:
        raise OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))

    monkeypatch.setattr(socket, "create_connection", bars)

    with pytest.raises(PeerLost, match=r"No route to host, at 127.0.0.1 port 4711; open that port to the"):
        thread_peers(2, book)[1].all_reduce_max([1])


def resets(connection: socket.socket) -> None:
    """Close it so that the other end gets a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@contextlib.contextmanager
def called(*calls: Callable[[], object]) -> Iterator[list[Future[object]]]:
    with ThreadPoolExecutor(len(calls)) as pool:
        yield [pool.submit(call) for call in calls]


@pytest.mark.parametrize("refuses", [lambda client: None, resets], ids=["closed", "reset"])
def test_a_rank_that_is_turned_away_tries_again(refuses: Callable[[socket.socket], None]) -> None:
    book = Book()
    ranks = thread_peers(2, book)
    with called(lambda: ranks[0].all_reduce_max([0])) as (first,):
        true = book.contact(0)
        with Listener(refuses) as gate:
            book.publish(0, replace(true, port=gate.endpoint.port).to_bytes())
            with called(lambda: ranks[1].all_reduce_max([1])) as (second,):
                wait_for(lambda: gate.accepted > 1, "a second try")
                assert not second.done()
                book.publish(0, true.to_bytes())

                assert [each.result(DEADLINE_S) for each in (first, second)] == [[1], [1]]


def test_the_address_of_a_rank_before_a_restart_is_forgotten_when_the_new_one_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is another process by now, which never responds."""
    monkeypatch.setattr(handshake, "RESPONSE_S", 0.05)
    with silent() as other:
        book = Book()
        ranks = thread_peers(2, book)
        book.publish(0, Contact(NAME, 0, "127.0.0.1", other.endpoint.port, b"s" * 32).to_bytes())
        with called(lambda: ranks[1].all_reduce_max([1])) as (joining,):
            wait_for(lambda: book.found > 1, "a second query of the store")
            assert not joining.done()

            assert ranks[0].all_reduce_max([0]) == [1]
            assert joining.result(DEADLINE_S) == [1]


@pytest.mark.parametrize("has_come", [True, False], ids=["is busy", "is not there yet"])
def test_a_death_is_an_error_on_a_rank_that_still_waits_to_meet_another_one(
    has_come: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 9 sends its number to rank 8, and dies. Rank 8 cannot send it to rank 0, which does not come."""
    monkeypatch.setattr(handshake, "RESPONSE_S", 0.5)
    ranks = thread_peers(10)
    if has_come:
        ranks[0].connections._listen()
    with called(lambda: ranks[8].all_reduce_max([8]), lambda: ranks[9].all_reduce_max([9])) as (waits, dies):
        met = {8: 9, 9: 8}
        wait_for(lambda: all(its in ranks[one].connections._connected for one, its in met.items()), "rank 9 at rank 8")
        ranks[9].connections._connected[8].shutdown(socket.SHUT_RDWR)

        with pytest.raises(PeerLost, match="rank 9 is gone"):
            waits.result(DEADLINE_S / 2)
        with pytest.raises(PeerLost):
            dies.result(DEADLINE_S)
