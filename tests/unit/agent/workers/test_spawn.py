"""agent.workers.spawn: the worker store's port, with real sockets, and the order to signal workers."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from elaunch.agent.config import AgentConfig, CannotRun
from elaunch.agent.workers.spawn import MasterPort, Spawner, reserve
from elaunch.rendezvous.types import JobSpec, Program, ProgramKind
from tests.harness import DEADLINE_S, free_ports

SPEC = JobSpec("job", Program(ProgramKind.SCRIPT, "train.py"))


def config(*ports: int, addr: str = "127.0.0.1") -> AgentConfig:
    return AgentConfig(SPEC, 1, {}, master_addr=addr, master_ports=ports)


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


@pytest.fixture
def taken() -> Iterator[list[int]]:
    """Two ports that are in use."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        yield [port_of(s) for s in sockets]


def test_without_a_wish_a_free_port_is_taken_a_fresh_one_each_time() -> None:
    with reserve(config()) as one, reserve(config()) as other:
        assert 0 < port_of(one) != port_of(other)


def test_the_first_free_port_of_a_range_is_taken(taken: list[int]) -> None:
    (port,) = free_ports(1)

    with reserve(config(*taken, port)) as listener:
        assert port_of(listener) == port


def test_a_taken_port_is_named_with_its_number_and_the_way_out(taken: list[int]) -> None:
    with pytest.raises(CannotRun) as caught:
        reserve(config(taken[0]))

    assert f"port {taken[0]} is in use on 127.0.0.1" in str(caught.value)
    assert "--master-port" in str(caught.value)


def test_an_address_of_another_host_or_of_none_is_an_error_with_the_way_out() -> None:
    # TEST-NET-1 (RFC 5737) and the .invalid domain (RFC 2606) have no hosts.
    with pytest.raises(CannotRun, match=r"192\.0\.2\.1 is not an address of this host .* --master-addr"):
        reserve(config(addr="192.0.2.1"))
    with pytest.raises(CannotRun, match=r"the address nowhere\.invalid is unknown .* --master-addr"):
        reserve(config(addr="nowhere.invalid"))


def test_a_name_that_is_loopback_to_this_host_alone_is_reached_at_every_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **how: real("127.0.1.1" if host == "me" else host, *rest, **how)
    )
    several = replace(config(addr="me"), spec=replace(SPEC, nodes_min=2, nodes_max=2))

    with reserve(several) as listener, socket.create_connection(("127.0.0.2", port_of(listener)), timeout=DEADLINE_S):
        pass
    with reserve(config(addr="me")) as listener:
        assert listener.getsockname()[0] == "127.0.1.1"


def is_taken(port: int) -> bool:
    try:
        reserve(config(port)).close()
    except CannotRun:
        return True
    return False


def test_the_one_port_that_was_requested_stays_reserved_between_two_generations() -> None:
    (wanted,) = free_ports(1)
    port = MasterPort(config(wanted))
    port.reserve()

    port.release()

    assert is_taken(wanted)
    assert port.reserve() == wanted
    port.close()


def test_a_notice_is_ordered_as_one_also_before_the_workers_forks_are_known() -> None:
    orders: list[tuple[object, ...]] = []
    server: Any = SimpleNamespace(signal=lambda *order, **how: orders.append((*order, how["is_notice"])))
    unused: Any = None
    group: Any = SimpleNamespace(generation=3, pids={})
    spawner = Spawner(replace(config(), notices=(signal.SIGUSR2,)), unused, unused, server)

    spawner.signal(group, {1, 0}, signal.SIGUSR2)

    assert orders == [(3, [0, 1], signal.SIGUSR2, True)]
