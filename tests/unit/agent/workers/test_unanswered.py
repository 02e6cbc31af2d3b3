"""agent.workers.unanswered: which connections of a process get no answer, and the sentence about it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import closing
from unittest.mock import Mock

import pytest

from elaunch.agent.workers import unanswered
from elaunch.agent.workers.group import WorkerGroup
from elaunch.agent.workers.unanswered import Unanswered, connecting, unanswered_in, unreached_words
from elaunch.rendezvous.endpoint import Endpoint
from elaunch.rendezvous.rules.table_codec import seats_of
from elaunch.rendezvous.types import RankTable

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"
ROW = "   0: 0200000A:9C4E {} {} 00000001:00000000 01:00000064 00000000     0        0 4711 2 0000000000000000 100 0"


def test_only_connections_whose_first_packet_is_unanswered_count() -> None:
    rows = [HEAD, ROW.format("0100004D:7530", "02"), ROW.format("0100004D:7531", "01"), "", "  1: torn"]

    assert list(unanswered_in("\n".join(rows))) == [("socket:[4711]", Endpoint("77.0.0.1", 30000))]


def test_addresses_of_both_families_are_read() -> None:
    plain, mapped = "00D8B80D00000000000000000A000000", "0000000000000000FFFF00000100004D"
    found = [remote for six in (plain, mapped) for _, remote in unanswered_in(ROW.format(f"{six}:0016", "02"))]

    assert [remote.host for remote in found] == ["db8:d800::a", "77.0.0.1"]


def test_a_connection_that_this_process_waits_for_is_found() -> None:
    # Its backlog is full, so the kernel answers no further one.
    with closing(socket.create_server(("127.0.0.1", 0), backlog=0)) as silent:
        place = silent.getsockname()
        sockets = [socket.socket() for _ in range(3)]
        for each in sockets:
            each.setblocking(False)
            each.connect_ex(place)

        found = set(connecting({7: os.getpid()}))
        none = set(connecting({7: os.getppid()}))

        for each in sockets:
            each.close()
    assert (7, Endpoint(*place)) in found
    assert (7, Endpoint(*place)) not in none


def test_the_sentence_has_the_port_the_reason_and_what_to_open() -> None:
    said = unreached_words([2, 1], Endpoint("node0", 5), "no answer", is_master=True)

    assert said.startswith(
        "ranks 1, 2 cannot connect to node0:5 (no answer), MASTER_PORT on the node of rank 0: a fire"
    )
    assert "--master-port FIRST:LAST" in said


def second_node(port: int) -> WorkerGroup:
    """The workers of the second of two nodes, which tell nothing of a process group."""
    seats = seats_of([("a-00000001", 1, "default"), ("b-00000001", 1, "default")])
    return WorkerGroup(RankTable(0, seats, "127.0.0.1", port, ""), 1, started_s=0.0)


def test_an_attempt_that_is_over_at_once_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: Endpoint) -> str:
        tried.append(True)
        return "refused"

    def at_once(work: Callable[[], None], _: str) -> threading.Thread:
        work()
        return threading.current_thread()

    tried: list[bool] = []
    monkeypatch.setattr(unanswered, "why_not", refused)
    monkeypatch.setattr(unanswered, "start_thread", at_once)
    group, watched = second_node(1), Unanswered(Mock())

    for now_s in (5.0, 10.0, 15.0, 20.0):
        watched.tick(group, now_s, has_store=True)

    assert len(tried) == 3


def test_workers_that_tell_nothing_are_looked_at_seldom_after_two_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked(_: object) -> tuple[()]:
        looks.append(now_s)
        return ()

    now_s, looks = 0, list[int]()
    monkeypatch.setattr(unanswered, "connecting", looked)
    group, watched = second_node(1), Unanswered(Mock())

    for now_s in range(24 * 3600):
        watched.tick(group, now_s, has_store=False)

    assert len([look for look in looks if look <= 120]) == 24
    # Once a minute from the half hour on.
    assert len(looks) < 1600
