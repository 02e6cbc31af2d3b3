"""Checks that this host's limit of open files is high enough for a store and all its agents."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable

from elaunch.launcher.errors import UsageError
from elaunch.rendezvous.server.connection_limits import agents_for, descriptors_for, slots


def check_descriptors(nodes: tuple[int, int], say: Callable[[str], None]) -> None:
    """Check the limit for a job of `nodes`, least and most. Raises UsageError if it is too low for the least.

    Call it before the head serves the store.
    """
    least, most = nodes
    limit = hard_limit()
    served = agents_for(slots(limit, most))
    if served >= most:
        return
    few = f"the limit of open files on this host is {limit}, which is enough for a store of {served} nodes"
    way_out = f"raise the hard limit to {descriptors_for(most)} (ulimit -Hn, LimitNOFILE= of systemd), or use an etcd"
    if served < least:
        raise UsageError(f"{few}, but --nnodes asks for {least}; {way_out}: --rdzv-endpoint etcd-host:2379")
    say(f"{few}, but --nnodes allows {most}: connections of further nodes may be refused; {way_out}")


def agents_served() -> int:
    """The number of agents that a store on this host can serve, if the job's size is not known."""
    return agents_for(slots(hard_limit()))


def hard_limit() -> int:
    """The number of files that a process of this user may open at a time on this host."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard
