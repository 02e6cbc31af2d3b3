"""Asks the scheduler about this process, and for the head's address if only the scheduler can resolve its name."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from elaunch.launcher.cluster.cluster import Cluster, HeadQuery
from elaunch.launcher.cluster.schedulers.registry import detect
from elaunch.launcher.network.reach import NoAddress, addresses
from elaunch.launcher.options.options import Options
from elaunch.launcher.options.small_file import read_small

_CALL_S = 10.0


def cluster_of(options: Options, environ: Mapping[str, str]) -> Cluster | None:
    """What a scheduler says about this process; None if there is none, or its user wants none. Raises UsageError."""
    found = None if options.standalone else detect(options.scheduler, environ, socket.gethostname(), read_small)
    return reachable(found) if found else None


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
