"""Reads names, this node's address, its ports, and asks the job's store."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from elaunch.agent.diagnosis.reach import REFUSED, why_not
from elaunch.launcher.doctor.facts import AddressFacts, NameFacts, NamesFacts, PortFacts, StoreFacts
from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.network.gloo import gloo_interface, interface_of
from elaunch.launcher.network.reach import AddressUnclear, NoAddress, addresses, can_be_bound, own_address
from elaunch.launcher.store.connect import store_of
from elaunch.launcher.store.head import decide_head, listen
from elaunch.launcher.store.rendezvous_plan import RendezvousPlan, Serving
from elaunch.rendezvous.addresses import is_address, is_loopback
from elaunch.rendezvous.endpoint import Endpoint
from elaunch.rendezvous.etcd.discovery import unverified_context
from elaunch.rendezvous.http.client import Deadline
from elaunch.rendezvous.http.dial import dial
from elaunch.rendezvous.http.request import DATE_FORMAT
from elaunch.rendezvous.http.resolve import resolve
from elaunch.rendezvous.http.response import Garbled, ResponseReader
from elaunch.rendezvous.store import Denied, Store, StoreError

_REQUESTS = 20
_RESOLVE_S = 2.0
_DIAL_S = 2.0
# A prefix under which nobody writes.
_NOTHING = "/elaunch-nothing/"
# Each look at the store's clock, a quarter of a second after the one before, narrows down when its second begins.
_LOOKS, _LOOK_EVERY_S, _LOOK_S = 3, 0.27, 1.0


def read_names(plan: RendezvousPlan) -> NamesFacts:
    hosts = dict.fromkeys(endpoint.host for endpoint in plan.endpoints)
    return NamesFacts(_name(socket.gethostname()), tuple(_name(host) for host in hosts if not is_address(host)))


def _name(name: str) -> NameFacts:
    start_s = time.monotonic()
    try:
        found = tuple(addresses(name, _RESOLVE_S))
    except NoAddress as error:
        return NameFacts(name, seconds=time.monotonic() - start_s, error=str(error).rpartition("(")[2].rstrip(")"))
    return NameFacts(name, found, time.monotonic() - start_s)


def read_address(plan: RendezvousPlan) -> AddressFacts:
    """The address that a job with this plan would use."""
    address = plan.own_addr
    try:
        if address is None:
            address = "127.0.0.1" if plan.is_alone else own_address(plan.endpoints, _RESOLVE_S)
        number = address if is_address(address) else addresses(address, _RESOLVE_S)[0]
    except (NoAddress, AddressUnclear) as error:
        return AddressFacts(address or "", error=str(error))
    interface = interface_of(number) or ""
    gloo = None if plan.is_alone else gloo_interface(number)
    return AddressFacts(address, interface, _speed(interface), gloo[0] if gloo else "")


def _speed(interface: str) -> int | None:
    with suppress(OSError, ValueError):
        speed = int(Path(f"/sys/class/net/{interface}/speed").read_text())
        return speed if speed > 0 else None
    return None


def read_ports(plan: RendezvousPlan, wanted: Sequence[int]) -> PortFacts:
    """Whether this node can listen on its address, and which of the wanted ports are taken."""
    address = read_address(plan).address or "127.0.0.1"
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    try:
        family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        error = _listens(family, place, 0)
    except OSError as unknown:
        error = unknown.strerror or str(unknown)
    if error:
        return PortFacts(address, error=error, ephemeral=(low, high))
    taken = tuple(port for port in wanted if _listens(family, place, port))
    return _with_peer(PortFacts(address, taken, ephemeral=(low, high)), plan, wanted)


def _with_peer(facts: PortFacts, plan: RendezvousPlan, wanted: Sequence[int]) -> PortFacts:
    """With some ports of the endpoint's host: the first and the last for MASTER_PORT, and two as gloo gets them."""
    host, found = plan.endpoints[0].host if plan.endpoints else "", list[str]()
    with suppress(NoAddress):
        found = addresses(host, _RESOLVE_S) if plan.serving is not Serving.NOTHING else []
    if not found or any(can_be_bound(address) or is_loopback(address) for address in found):
        return facts
    tried = tuple(dict.fromkeys([*wanted[:1], *wanted[-1:], *random.sample(range(*facts.ephemeral), 2)]))
    # A refusal is an answer.
    silent = {port: why for port in tried if (why := why_not(Endpoint(host, port))) not in ("", REFUSED)}
    return replace(facts, peer=host, tried=tried, silent=tuple(silent), why=next(iter(silent.values()), ""))


def _listens(family: int, place: tuple[object, ...], port: int) -> str:
    """Why this node cannot listen there; empty if it can."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((place[0], port, *place[2:]))
            probe.listen(1)
        except OSError as error:
            return error.strerror or str(error)
    return ""


def read_store(plan: RendezvousPlan) -> StoreFacts | None:
    """How the job's store answers; None if the job needs none."""
    if plan.is_alone:
        return None
    where = ",".join(str(endpoint) for endpoint in plan.endpoints)
    is_served = plan.serving is not Serving.NOTHING
    try:
        with closing(store_of(plan, lambda _: None)) as store:
            version = store.check()
            latencies = _latencies(store)
            skew = _skew(plan)
    except Denied as error:
        return StoreFacts(where, trouble="denied", why=str(error))
    except UsageError as error:
        return StoreFacts(where, trouble="denied", why=str(error))
    except StoreError as error:
        return _unreached(plan, where, is_served, str(error))
    low, high = skew or (None, None)
    return StoreFacts(where, version, is_served=is_served, latencies_s=latencies, skew_from_s=low, skew_to_s=high)


def _latencies(store: Store) -> tuple[float, ...]:
    took = []
    for _ in range(_REQUESTS):
        start_s = time.monotonic()
        store.read(_NOTHING)
        took.append(time.monotonic() - start_s)
    return tuple(took)


def _unreached(plan: RendezvousPlan, where: str, is_served: bool, why: str) -> StoreFacts:
    """Whether a host answers there that has no store yet; if this node would serve it, whether it can listen."""
    endpoint, is_refused = plan.endpoints[0], False
    try:
        dial(resolve(endpoint.host, endpoint.port, _RESOLVE_S), Deadline(_DIAL_S).left).close()
    except ConnectionRefusedError:
        is_refused = True
    except OSError:
        pass
    is_head = is_served and decide_head(plan, lambda _: None)
    listen_error = ""
    if is_head:
        try:
            if bound := listen(endpoint):
                bound.listener.close()
            else:
                listen_error = "another program listens there, which is no store"
        except (UsageError, SiteError) as error:
            listen_error = str(error)
    # A head whose name is a balancer's, or that has no route to itself, serves all the same.
    trouble = "refused" if is_refused or (is_head and not listen_error) else "away"
    return StoreFacts(where, trouble=trouble, why=why, is_served=is_served, is_head=is_head, listen_error=listen_error)


def _skew(plan: RendezvousPlan) -> tuple[float, float] | None:
    """The store's clock minus this host's, from and to; None if the store does not tell its time."""
    bounds: list[tuple[float, float]] = []
    for look in range(_LOOKS):
        if look:
            time.sleep(_LOOK_EVERY_S)
        start_s = time.time()
        told_s = _date_of(plan.endpoints[0])
        if told_s is None:
            return None
        # The header has whole seconds: the store's clock was between `told_s` and a second more.
        bounds.append((told_s - time.time(), told_s + 1 - start_s))
    low, high = max(low for low, _ in bounds), min(high for _, high in bounds)
    # A clock that was set meanwhile.
    return (low, high) if low <= high else None


def _date_of(endpoint: Endpoint) -> float | None:
    """The time in the answer of the server there, whoever it is: no token is shown to it."""
    for context in (unverified_context(), None):
        with suppress(OSError, Garbled, ValueError):
            deadline = Deadline(_LOOK_S)
            connected = dial(resolve(endpoint.host, endpoint.port, _RESOLVE_S), deadline.left)
            connected.settimeout(_LOOK_S)
            with closing(context.wrap_socket(connected) if context else connected) as line:
                line.sendall(f"GET /version HTTP/1.1\r\nHost: {endpoint}\r\nConnection: close\r\n\r\n".encode())
                reply = ResponseReader()
                while not reply.status and (data := line.recv(4096)):
                    reply.feed(data)
                text = reply.headers.get("date", "")
                return float(_seconds(text)) if text else None
    return None


def _seconds(date: str) -> int:
    import calendar

    return calendar.timegm(time.strptime(date, DATE_FORMAT))
