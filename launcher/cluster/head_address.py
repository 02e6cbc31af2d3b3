"""The head's address, where its name is one that only the scheduler knows."""

from __future__ import annotations

import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import replace

from elaunch.launcher.cluster.cluster import Cluster
from elaunch.launcher.network.reach import NoAddress, addresses

_CALL_S = 10.0


def reachable(cluster: Cluster) -> Cluster:
    """`cluster` with a head that has an address, as far as its scheduler tells: a node's name need be no host's."""
    if cluster.head is None or cluster.scheduler != "Slurm":
        return cluster
    with suppress(NoAddress):
        addresses(cluster.head)
        return cluster
    return replace(cluster, head=_node_address(cluster.head) or cluster.head)


def _node_address(node: str) -> str | None:
    if shutil.which("scontrol") is None:
        return None
    command = ["scontrol", "--oneliner", "show", "node", node]
    with suppress(OSError, subprocess.TimeoutExpired):
        said = subprocess.run(command, capture_output=True, text=True, timeout=_CALL_S)
        if found := re.search(r"\bNodeAddr=(\S+)", said.stdout):
            return found[1]
    return None
