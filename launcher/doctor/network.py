"""Checks of the network: this node's address, its ports and those of the head, and the job's store."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from statistics import median

from elaunch.agent.diagnosis.investigate import REFUSED, connect_error, ephemeral_ports
from elaunch.launcher.doctor.host import Finding, Needs, bad, ok, warn
from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.host import (
    NoAddress,
    Owner,
    addresses,
    can_be_bound,
    gloo_interface,
    interface_of,
    own_address,
    owner_of,
)
from elaunch.launcher.inspect.text import duration
from elaunch.launcher.store.connect import store_of
from elaunch.launcher.store.locate import RendezvousPlan
from elaunch.launcher.store.serve import decide_head, listen
from elaunch.rendezvous.endpoint import Endpoint, is_address
from elaunch.rendezvous.store import Denied, StoreError

_RESOLVE_S = 2.0
_SLOW_RESOLVER_S = 1.0
# An agent sends 1.6 requests a second, each with a deadline of 0.5 s.
_REQUESTS, _SLOW_STORE_S, _TOO_SLOW_STORE_S = 20, 0.1, 0.5
# A prefix that no job uses.
_NOTHING = "/elaunch-nothing/"


def check_address(plan: RendezvousPlan, needs: Needs) -> Iterator[Finding]:
    """How the other nodes reach this one, and which interface gloo must be given."""
    start_s = time.monotonic()
    try:
        address = plan.own_addr or ("127.0.0.1" if plan.is_alone else own_address(plan.endpoints, _RESOLVE_S))
        number = address if is_address(address) else addresses(address, _RESOLVE_S)[0]
    except (NoAddress, UsageError) as error:
        yield bad(str(error), "correct --rdzv-endpoint, the name or the route, or give --local-addr")
        return
    if not can_be_bound(number):
        yield bad(f"this node cannot listen on {address}", "give one of its own: --local-addr")
    elif needs.nodes_max == 1:
        yield ok(f"one node: the workers meet at {address}")
    else:
        gloo = gloo_interface(number)
        text = f"the other nodes reach this one at {address} ({interface_of(number) or 'no interface has it'})"
        if (took_s := time.monotonic() - start_s) > _SLOW_RESOLVER_S:
            yield warn(f"{text}; the resolver took {duration(took_s)}", "check the first server in /etc/resolv.conf")
        else:
            yield ok(f"{text}; GLOO_SOCKET_IFNAME={gloo[0]} is set for the workers: {gloo[1]}" if gloo else text)


def check_ports(plan: RendezvousPlan, needs: Needs) -> Iterator[Finding]:
    """Whether a firewall blocks ports of the endpoint's host: MASTER_PORT, and ephemeral ones, as gloo and NCCL get."""
    host = plan.endpoints[0].host if plan.endpoints and plan.serves else ""
    is_other = False
    with suppress(NoAddress):
        is_other = bool(host) and owner_of(host, _RESOLVE_S) is Owner.OTHER_HOST
    if not is_other:
        yield ok("no other node's ports are tried from here")
        return
    low, high = ephemeral_ports()
    tried = tuple(dict.fromkeys([*needs.ports[:1], *needs.ports[-1:], *random.sample(range(low, high), 2)]))
    # A refused connection has passed the firewall.
    silent = {port: why for port in tried if (why := connect_error(Endpoint(host, port))) not in ("", REFUSED)}
    if silent:
        yield warn(
            f"{host} does not answer on ports {', '.join(map(str, silent))} ({next(iter(silent.values()))})",
            "if it is a node of the job, its firewall must let all nodes through to MASTER_PORT (--master-port"
            f" FIRST:LAST limits it), and to {low}-{high}, from which the kernel gives gloo and NCCL theirs",
        )
    else:
        yield ok(f"{host} answers on ports {', '.join(map(str, tried))}, as MASTER_PORT, gloo and NCCL need it")


def check_store(plan: RendezvousPlan) -> Iterator[Finding]:
    """Whether the job's store is reachable, accepts this node, and responds in time."""
    if plan.is_alone:
        yield ok("one node needs no store")
        return
    where = ",".join(str(endpoint) for endpoint in plan.endpoints)
    try:
        with closing(store_of(plan, lambda _: None)) as store:
            version = store.check()
            latencies_s = []
            for _ in range(_REQUESTS):
                start_s = time.monotonic()
                store.read(_NOTHING)
                latencies_s.append(time.monotonic() - start_s)
        yield judge_latencies(f"{where} answers (version {version})", latencies_s)
    except (Denied, UsageError) as error:
        yield bad(str(error), "a job with these options is refused, and ends with exit code 2")
    except StoreError as error:
        yield _unreached(plan, where, str(error))


def judge_latencies(text: str, latencies_s: Sequence[float]) -> Finding:
    """The finding about the latencies of a store's responses."""
    middle_s = median(latencies_s)
    text = (
        f"{text}: median {duration(middle_s)} of {len(latencies_s)} requests, the longest {duration(max(latencies_s))}"
    )
    if middle_s > _TOO_SLOW_STORE_S:
        return bad(text, "a request has 0.5 s; use a nearer store, or --rdzv-conf lease_ttl=10")
    if middle_s > _SLOW_STORE_S:
        return warn(text, "use a nearer or less busy store; etcd needs a local SSD")
    return ok(text)


def _unreached(plan: RendezvousPlan, where: str, why: str) -> Finding:
    """Why no store was reached; if this node would serve it, whether it can listen."""
    if not plan.serves:
        return bad(f"{where} cannot be reached: {why}", "start etcd; check the firewall, the route, --rdzv-endpoint")
    if not decide_head(plan, lambda _: None):
        way_out = "this is fine if the head has not started yet; else check the firewall, the route, --rdzv-endpoint"
        return warn(f"no store answers at {where} yet: {why}", way_out)
    try:
        if listener := listen(plan.endpoints[0]):
            listener.close()
            return ok(f"nothing listens at {where} yet; this node would serve the job's store there")
        trouble = "another program listens there, which is not a store"
    except (UsageError, SiteError) as error:
        trouble = str(error)
    return bad(f"this node cannot serve the store at {where}: {trouble}", "choose another port")
