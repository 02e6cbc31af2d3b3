"""launcher.network.reach: this host's address toward the others, and whether a name means this host."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading

import pytest

from elaunch.launcher.network import reach
from elaunch.launcher.network.reach import NoAddress, Owner, can_be_bound, own_address, owner_of, routable_addresses
from elaunch.rendezvous.endpoint import Endpoint
from elaunch.rendezvous.http.resolve import HostAddress


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The names that the resolver knows, made up by the test."""
    known: dict[str, list[str]] = {}
    resolve = reach.resolve

    def told(host: str, port: int, wait_s: float) -> list[HostAddress]:
        return [found for address in known.get(host, [host]) for found in resolve(address, port, wait_s)]

    monkeypatch.setattr(reach, "resolve", told)
    return known


def test_a_loopback_endpoint_is_reached_from_loopback() -> None:
    assert own_address([Endpoint("127.0.0.1", 9)]) == "127.0.0.1"
    assert own_address([Endpoint("localhost", 9)]) in ("127.0.0.1", "::1")


def test_an_ipv6_endpoint_is_reached_from_an_ipv6_address() -> None:
    assert own_address([Endpoint("::1", 9)]) == "::1"


def test_the_first_endpoint_that_can_be_reached_decides() -> None:
    assert own_address([Endpoint("no-such-host.invalid", 9), Endpoint("127.0.0.1", 9)]) == "127.0.0.1"


def test_a_name_that_nobody_knows_is_a_sentence() -> None:
    with pytest.raises(NoAddress, match=r"^the name no-such-host\.invalid has no address here \(.+\)$"):
        own_address([Endpoint("no-such-host.invalid", 9)])


def test_a_resolver_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answer = threading.Event(), threading.Event()

    def hang(host: str, *args: object, flags: int = 0, **kwargs: object) -> object:
        if flags & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "no number")
        asked.set()
        answer.wait(180)
        raise socket.gaierror(socket.EAI_AGAIN, "too late")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    try:
        with pytest.raises(NoAddress, match="slow-host"):
            own_address([Endpoint("slow-host", 9)], wait_s=0.01)
        assert asked.is_set()
    finally:
        answer.set()


def test_a_name_is_ours_if_all_its_addresses_can_be_bound_here(names: dict[str, list[str]]) -> None:
    names.update(me=["127.0.0.1", "::1"], they=["192.0.2.77"], all=["127.0.0.1", "192.0.2.77"])

    assert owner_of("me") is Owner.THIS_HOST
    assert owner_of("they") is Owner.OTHER_HOST
    assert owner_of("all") is Owner.SEVERAL_HOSTS


def test_an_address_of_this_host_can_be_bound_and_no_other() -> None:
    assert can_be_bound("127.0.0.1")
    assert can_be_bound("::1")
    assert not can_be_bound("192.0.2.77")
    assert not can_be_bound("2001:db8::77")


def test_a_name_that_is_loopback_here_alone_gives_an_address_that_others_reach(names: dict[str, list[str]]) -> None:
    names["host0"] = ["127.0.1.1"]

    expected = routable_addresses()

    assert own_address([Endpoint("host0", 9)]) == (expected[0] if expected else "127.0.1.1")


_IN_A_HOST = (
    "import sys; from elaunch.launcher.network.reach import *; from elaunch.rendezvous.endpoint import Endpoint; "
)


def in_a_host(*addresses: str, code: str) -> str:
    """Run `code` in a network of its own with `addresses`, one per interface, no default route. Returns its output."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("needs root, ip and unshare to make a network namespace")
    up = ["ip link set lo up"]
    for i, address in enumerate(addresses):
        # An IPv6 address is not used before nobody else has answered for it.
        at_once = "nodad" if ":" in address else ""
        up += [
            f"ip link add v{i} type veth peer name w{i}",
            f"ip link set w{i} up",
            f"ip link set v{i} up",
            f"ip address add {address} dev v{i} {at_once}",
        ]
    script = " && ".join([*up, 'exec "$@"'])
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", script, "sh", sys.executable, "-c", _IN_A_HOST + code],
        capture_output=True,
        text=True,
        check=True,
        timeout=180,
    )
    return done.stdout.strip()


# On every host, and nowhere else: as /etc/hosts of Debian has a host's own name.
_OWN_NAME = (
    "from elaunch.launcher.network import reach; real = reach.resolve; "
    "reach.resolve = lambda host, *rest: real('127.0.1.1' if host == 'host0' else host, *rest); "
)


@pytest.mark.parametrize("off", ["all", "lo"])
def test_an_address_that_cannot_be_used_without_ipv6_does_not_count(off: str) -> None:
    code = (
        f"open('/proc/sys/net/ipv6/conf/{off}/disable_ipv6', 'w').write('1'); "
        "from elaunch.launcher.network import reach; real = reach.resolve; "
        "known = {'localhost': ['::1', '127.0.0.1'], 'host0': ['2001:db8::7', '10.98.0.1'], 'v6': ['2001:db8::7']}; "
        "reach.resolve = lambda host, *rest: [each for one in known[host] for each in real(one, *rest)]; "
        "print(addresses('localhost'), owner_of('localhost').name, *addresses('host0'), owner_of('v6').name)"
    )

    # Where only the loopback interface is without IPv6, the host has an address of the link.
    others = "10.98.0.1" if off == "all" else "2001:db8::7 10.98.0.1"
    assert in_a_host("10.98.0.1/24", code=code) == f"['127.0.0.1'] THIS_HOST {others} OTHER_HOST"


def test_without_a_default_route_the_only_interface_has_the_address() -> None:
    code = _OWN_NAME + "print(own_address([Endpoint('host0', 9)]), owner_of('host0').name)"

    assert in_a_host("10.9.8.7/24", code=code) == "10.9.8.7 THIS_HOST"
    assert in_a_host("fd00:9::7/64", code=code) == "fd00:9::7 THIS_HOST"
    # No other host can have this address.
    assert in_a_host(code=code) == "127.0.1.1 THIS_HOST"


def test_of_several_interfaces_none_is_guessed() -> None:
    code = _OWN_NAME + ("\ntry: own_address([Endpoint('host0', 9)])\nexcept AddressUnclear as error: print(error)")

    assert in_a_host("10.9.8.7/24", "10.9.9.7/24", code=code) == (
        "host0 is a loopback address here, and this host has several other addresses (10.9.8.7, 10.9.9.7);"
        " say with --local-addr which one the other nodes reach"
    )


def test_of_several_interfaces_the_one_toward_the_endpoint_is_taken() -> None:
    code = "print(own_address([Endpoint('10.9.9.1', 9)]), own_address([Endpoint('fd00:9::1', 9)]))"

    assert in_a_host("10.9.8.7/24", "10.9.9.7/24", "fd00:9::7/64", code=code) == "10.9.9.7 fd00:9::7"


def test_an_endpoint_without_a_route_is_a_sentence() -> None:
    code = "\ntry: own_address([Endpoint('10.1.2.3', 9)])\nexcept NoAddress as error: print(error)"

    assert in_a_host("10.9.8.7/24", code=code) == "there is no route to 10.1.2.3 (10.1.2.3)"
