"""The agent's ends of the links: an end wakes it, a word does not."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Iterator

import pytest

from elaunch.agent.links import Link, Links


@pytest.fixture
def pair() -> Iterator[tuple[Link, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield Link(0, ours), theirs


def says(worker: socket.socket, **message: object) -> None:
    worker.send(json.dumps(message).encode() + b"\n")


def is_readable(links: Links) -> bool:
    return bool(select.select([links], [], [], 0)[0])


def test_a_word_wakes_nobody_and_is_read_when_it_is_time(pair: tuple[Link, socket.socket]) -> None:
    link, worker = pair
    links = Links()
    links.add(link)

    says(worker, event="progress", step=7)

    assert not is_readable(links)
    assert links.due_s is not None
    assert links.due(links.due_s - 0.01) == []
    assert links.due(links.due_s) == [link]
    assert link.read()
    assert link.step == 7


def test_after_a_look_the_next_one_is_a_second_later(pair: tuple[Link, socket.socket]) -> None:
    links = Links()
    links.add(pair[0])
    now_s = time.monotonic() + 5

    links.due(now_s)

    assert links.due_s == now_s + 1
    assert links.due(now_s + 0.5) == []


@pytest.mark.parametrize("end", ["dies", "has said its last"])
def test_an_end_wakes_and_the_words_before_it_are_there(pair: tuple[Link, socket.socket], end: str) -> None:
    link, worker = pair
    links = Links()
    links.add(link)

    says(worker, event="progress", step=3)
    says(worker, event="ended", raised=True, reached_store=False)
    if end == "dies":
        worker.close()
    else:
        worker.shutdown(socket.SHUT_WR)

    assert is_readable(links)
    assert links.ended() == [link]
    assert link.read()
    assert (link.step, link.raised, link.reached_store) == (3, True, False)
    assert not link.read()


def test_a_dropped_link_is_closed_and_wanted_no_more(pair: tuple[Link, socket.socket]) -> None:
    link, worker = pair
    links = Links()
    links.add(link)

    links.drop(link)
    worker.close()

    assert link.fileno() == -1
    assert not is_readable(links)
    assert links.due_s is None
    links.drop(link)


def test_notes_are_taken_once(pair: tuple[Link, socket.socket]) -> None:
    link, worker = pair

    says(worker, event="note", text="said")
    link.read()

    assert link.take_notes() == ["said"]
    assert link.take_notes() == []


@pytest.mark.parametrize("junk", [b"\xff\xfe\n", b"[]\n", b"{}\n", b'{"event": "progress", "step": "x"}\n', b"\n\n"])
def test_what_is_no_message_is_dropped(pair: tuple[Link, socket.socket], junk: bytes) -> None:
    link, worker = pair

    worker.send(junk)
    says(worker, event="progress", step=1)
    link.read()

    assert link.step == 1
