"""Judges names, this node's address, the ports, and the job's store."""

from __future__ import annotations

from statistics import median

from elaunch.launcher.doctor.facts import AddressFacts, NameFacts, NamesFacts, Needs, PortFacts, StoreFacts
from elaunch.launcher.doctor.findings import Finding, bad, ok, span, warn

_SLOW_RESOLVER_S = 1.0
# A request has 0.5 s; an agent sends 1.6 requests a second.
_SLOW_STORE_S, _TOO_SLOW_STORE_S = 0.1, 0.5
_SKEW_MAX_S = 1.0


def judge_names(facts: NamesFacts, needs: Needs) -> tuple[Finding, ...]:
    found = [_own_name(facts.own, needs)]
    for name in facts.endpoints:
        if name.error:
            found.append(
                bad(
                    f"the endpoint's name {name.name} has no address here: {name.error}",
                    "correct --rdzv-endpoint, or give the address instead of the name",
                )
            )
        else:
            found.append(_resolved(name))
    return tuple(found)


def _own_name(own: NameFacts, needs: Needs) -> Finding:
    if own.error and needs.nodes_max > 1:
        return warn(
            f"this host's own name, {own.name}, has no address ({own.error}); gloo is told its interface",
            f"add {own.name} to /etc/hosts or the DNS",
        )
    if own.error:
        # gloo and torch's stores take 127.0.0.1 then.
        return ok(f"this host's own name, {own.name}, has no address; on one node none is needed")
    return _resolved(own)


def _resolved(name: NameFacts) -> Finding:
    text = f"{name.name} is {', '.join(name.addresses[:3])}"
    if name.seconds > _SLOW_RESOLVER_S:
        return warn(f"{text}; the resolver took {span(name.seconds)}", "check the first server in /etc/resolv.conf")
    return ok(text)


def judge_address(facts: AddressFacts, needs: Needs) -> tuple[Finding, ...]:
    if facts.error:
        return (bad(facts.error, "correct --rdzv-endpoint or the route, or give --local-addr"),)
    speed = f", {facts.speed_mbps / 1000:g} Gbit/s" if facts.speed_mbps else ""
    interface = f" ({facts.interface}{speed})" if facts.interface else ""
    text = f"the other nodes reach this one at {facts.address}{interface}"
    if needs.nodes_max == 1:
        return (ok(f"one node: the workers meet at {facts.address}"),)
    return (ok(f"{text}; GLOO_SOCKET_IFNAME={facts.gloo} is set for the workers" if facts.gloo else text),)


def judge_ports(facts: PortFacts, needs: Needs) -> tuple[Finding, ...]:
    if facts.error:
        return (bad(f"this node cannot listen on {facts.address}: {facts.error}", "give one of its own: --local-addr"),)
    return (*_own_ports(facts, needs), *_peers_ports(facts))


def _peers_ports(facts: PortFacts) -> tuple[Finding, ...]:
    if not facts.peer:
        return ()
    if not facts.silent:
        return (ok(f"{facts.peer} answers at ports {_listed(facts.tried)}, as MASTER_PORT, gloo and NCCL need it"),)
    low, high = facts.ephemeral
    return (
        warn(
            f"{facts.peer} does not answer at ports {_listed(facts.silent)} ({facts.why})",
            "if it is a node of the job, its firewall must let all nodes through to MASTER_PORT (--master-port"
            f" FIRST:LAST limits it), and to {low}-{high}, from which the kernel gives gloo and NCCL theirs",
        ),
    )


def _listed(ports: tuple[int, ...]) -> str:
    return ", ".join(map(str, ports))


def _own_ports(facts: PortFacts, needs: Needs) -> tuple[Finding, ...]:
    if not needs.ports:
        unseen = "" if facts.peer else "; a firewall between the nodes is not seen from here"
        return (ok(f"this node can listen on {facts.address}{unseen}"),)
    first, last, count = needs.ports[0], needs.ports[-1], len(needs.ports)
    wanted = f"port {first}" if count == 1 else f"ports {first} to {last}"
    if len(facts.taken) == count:
        return (
            bad(
                f"{wanted} for MASTER_PORT: in use, or not allowed, on {facts.address}",
                f"see who has it (ss -ltnp 'sport = :{first}'), or choose others with --master-port FIRST:LAST",
            ),
        )
    low, high = facts.ephemeral
    if count == 1 and low <= first <= high:
        return (
            warn(
                f"{wanted} is free, but the kernel may give it to an outgoing connection ({low} to {high})",
                f"choose a port below {low}, or leave --master-port out",
            ),
        )
    return (ok(f"{wanted} for MASTER_PORT: {count - len(facts.taken)} of {count} free"),)


def judge_store(facts: StoreFacts | None, _needs: Needs) -> tuple[Finding, ...]:
    if facts is None:
        return (ok("one node needs no store"),)
    if facts.trouble:
        return (_unreached(facts),)
    middle_s = median(facts.latencies_s) if facts.latencies_s else 0.0
    text = (
        f"{facts.endpoint} answers (version {facts.version}): median {span(middle_s)} of {len(facts.latencies_s)}"
        f" requests, the longest {span(max(facts.latencies_s, default=0.0))}"
    )
    found = ok(text)
    if middle_s > _TOO_SLOW_STORE_S:
        found = bad(text, "a request has 0.5 s; use a nearer store, or --rdzv-conf lease_ttl=10")
    elif middle_s > _SLOW_STORE_S:
        found = warn(text, "use a nearer or less busy store; etcd wants a local SSD")
    return (found, *_skew(facts))


def _unreached(facts: StoreFacts) -> Finding:
    where = f"nothing listens at {facts.endpoint}"
    match facts.trouble:
        case "denied":
            return bad(facts.why, "a job with these options is refused, and ends with exit code 2")
        case "refused" if facts.is_head and facts.listen_error:
            return bad(f"{where}, and this node cannot serve the store: {facts.listen_error}", "choose another port")
        case "refused" if facts.is_head:
            return ok(f"{where} yet; this node would serve the job's store there")
        case "refused" if facts.is_served:
            return warn(f"{where} yet", "this is fine if the head has not started yet; else correct --rdzv-endpoint")
        case "refused":
            return bad(where, "start the etcd, or correct --rdzv-endpoint")
        case _:
            return bad(
                f"{facts.endpoint} cannot be reached: {facts.why}",
                "check the firewall, the route and --rdzv-endpoint",
            )


def _skew(facts: StoreFacts) -> tuple[Finding, ...]:
    low, high = facts.skew_from_s, facts.skew_to_s
    if low is None or high is None:
        return ()
    precision = f"by its HTTP Date header, to {span((high - low) / 2)}"
    if low > _SKEW_MAX_S or high < -_SKEW_MAX_S:
        middle_s = (low + high) / 2
        which = "behind" if middle_s > 0 else "ahead of"
        return (
            warn(
                f"this host's clock is {span(abs(middle_s))} {which} the store's ({precision})",
                "start chrony or systemd-timesyncd on both hosts: log lines of the nodes cannot be put in order",
            ),
        )
    return (ok(f"this host's clock and the store's agree ({precision})"),)
