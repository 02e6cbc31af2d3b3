"""Finds the head's address if only the scheduler can resolve the head's name."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import suppress

from elaunch.launcher.cluster.cluster import Cluster, HeadQuery
from elaunch.launcher.network.reach import NoAddress, addresses
from elaunch.records import replace

_CALL_S = 10.0


def reachable(cluster: Cluster) -> Cluster:
    """`cluster` with a head that can be resolved, if the scheduler tells one. A node's name need not be a host name."""
    query = cluster.head_query
    if query is None:
        return cluster
    if cluster.head:
        with suppress(NoAddress):
            addresses(cluster.head)
            return cluster
    return replace(cluster, head=_asked(query) or cluster.head)


def _asked(query: HeadQuery) -> str | None:
    if shutil.which(query.command[0]) is None:
        return None
    with suppress(OSError, subprocess.TimeoutExpired):
        said = subprocess.run(query.command, capture_output=True, text=True, errors="replace", timeout=_CALL_S)
        return query.answer(said.stdout)
    return None
