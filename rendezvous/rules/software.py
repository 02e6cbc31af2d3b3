"""Tells nodes apart whose software differs: their ranks may not understand each other. Pure."""

from __future__ import annotations

from collections.abc import Sequence

# Hosts that are named for each kind of software, and kinds.
_HOSTS_MAX = 3
_KINDS_MAX = 3


def mismatch_of(nodes: Sequence[tuple[str, str]]) -> str:
    """A sentence about nodes (host, software), of which some differ. Those without a word of theirs are left out."""
    kinds = {software for _, software in nodes if software}
    hosts = {kind: list(dict.fromkeys(host for host, software in nodes if software == kind)) for kind in kinds}
    # The kind that most nodes have comes first.
    ordered = sorted(hosts, key=lambda kind: (-len(hosts[kind]), kind))
    parts = [f"{kind} on {_shown(hosts[kind])}" for kind in ordered[:_KINDS_MAX]]
    if len(ordered) > _KINDS_MAX:
        parts.append("and others")
    return f"the nodes have different software: {'; '.join(parts)}"


def _shown(hosts: Sequence[str]) -> str:
    more = f" and {len(hosts) - _HOSTS_MAX} more" if len(hosts) > _HOSTS_MAX else ""
    return ", ".join(hosts[:_HOSTS_MAX]) + more
