"""launcher.network.gloo: which network interface gloo is told of, and when."""

from __future__ import annotations

import socket
import threading
from typing import Any, NoReturn

import pytest

from elaunch.launcher.network import gloo
from elaunch.launcher.network.gloo import gloo_interface, interface_of, socket_variables
from elaunch.launcher.network.reach import NoAddress


@pytest.fixture
def own_addresses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses of this host's own name. If the list is empty, the name is unknown."""
    known: list[str] = []

    def told(host: str, wait_s: float) -> list[str]:
        assert host == "node-a"
        if not known:
            raise NoAddress("unknown")
        return known

    monkeypatch.setattr(socket, "gethostname", lambda: "node-a")
    monkeypatch.setattr(gloo, "addresses", told)
    monkeypatch.setattr(gloo, "_name_of", lambda _: None)
    monkeypatch.setattr(gloo, "interface_of", {"10.0.0.1": "eth1"}.get)
    return known


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
    assert interface_of("fe80::1%eth7") == "eth7"


def test_a_host_that_knows_itself_as_loopback_needs_to_be_told(own_addresses: list[str]) -> None:
    own_addresses += ["127.0.1.1", "10.0.0.1"]

    assert gloo_interface("10.0.0.1") == ("eth1", "this host resolves its own name, node-a, to 127.0.1.1")


def test_a_host_whose_name_is_unknown_needs_to_be_told(own_addresses: list[str]) -> None:
    assert gloo_interface("10.0.0.1") == ("eth1", "this host's own name, node-a, has no address")


def test_an_address_that_is_another_hosts_is_passed_over_as_gloo_does(
    own_addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_addresses += ["192.0.2.7", "127.0.1.1"]
    monkeypatch.setattr(gloo, "can_be_bound", lambda address: address != "192.0.2.7")

    assert gloo_interface("10.0.0.1") is not None


def test_a_host_with_a_name_of_its_own_is_left_alone(own_addresses: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    own_addresses += ["10.0.0.9"]
    monkeypatch.setattr(gloo, "can_be_bound", lambda _: True)

    assert gloo_interface("10.0.0.1") is None


def test_agents_on_one_host_need_nothing(own_addresses: list[str]) -> None:
    own_addresses += ["127.0.1.1"]

    assert gloo_interface("127.0.0.1") is None


def test_rpc_is_told_of_the_same_interface_and_the_users_own_variables_stay(own_addresses: list[str]) -> None:
    own_addresses += ["127.0.1.1"]
    said: list[str] = []

    quiet = socket_variables("10.0.0.1", {}, said.append, verbose=False)
    assert said == []
    both = socket_variables("10.0.0.1", {}, said.append, verbose=True)
    only_rpc = socket_variables("10.0.0.1", {"GLOO_SOCKET_IFNAME": "mine"}, said.append, verbose=True)
    neither = socket_variables(
        "10.0.0.1", {"GLOO_SOCKET_IFNAME": "a", "TP_SOCKET_IFNAME": "b"}, said.append, verbose=True
    )

    assert quiet == both == {"GLOO_SOCKET_IFNAME": "eth1", "TP_SOCKET_IFNAME": "eth1"}
    assert (only_rpc, neither) == ({"TP_SOCKET_IFNAME": "eth1"}, {})
    assert said == [
        "GLOO_SOCKET_IFNAME=eth1 is set for the workers: this host resolves its own name, node-a, to 127.0.1.1"
    ]


def test_on_one_host_a_resolver_that_does_not_answer_is_not_waited_for_by_the_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []
    answer = threading.Event()

    def hang(address: object, *_: object) -> NoReturn:
        asked.append(address)
        answer.wait(180)
        raise socket.gaierror(socket.EAI_AGAIN, "too late")

    real = socket.getaddrinfo

    def lookup(host: Any, *rest: Any, **options: Any) -> Any:
        return real(host, *rest, **options) if options.get("flags") else hang(host)

    monkeypatch.setattr(socket, "gethostname", lambda: "node-a")
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(socket, "getnameinfo", hang)
    monkeypatch.setattr(gloo, "_RESOLVE_S", 0.05)
    said: list[str] = []
    try:
        found = socket_variables("127.0.0.1", {"TP_SOCKET_IFNAME": "mine"}, said.append, verbose=False)
        own = socket_variables("127.0.0.1", {**found, "TP_SOCKET_IFNAME": "mine"}, said.append, verbose=True)
    finally:
        answer.set()

    assert ("::ffff:127.0.0.1", 0) in asked
    assert found == {"GLOO_SOCKET_IFNAME": "lo", "RES_OPTIONS": "timeout:1 attempts:2"}
    assert [line.split(" is set for the workers: ")[0] for line in said] == [
        "GLOO_SOCKET_IFNAME=lo",
        "RES_OPTIONS='timeout:1 attempts:2'",
    ]
    assert own == {}
