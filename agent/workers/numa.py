"""Chooses CPUs for a worker near its GPU. The modes are torchrun's (torch/numa/binding.py), without numactl."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elaunch.agent.config import NumaBinding
from elaunch.agent.workers.gpus import read_gpus, visible

# Linux can be built for 8192 CPUs at most; this is eight times as many.
_CPU_MAX = (1 << 16) - 1


@dataclass(frozen=True)
class Topology:
    """The host as this process may use it.

    `nodes` are the allowed CPUs of each NUMA node that has any. `packages`, `cores` and `caches` name each CPU's
    socket, physical core and largest shared cache, if it is known; CPUs with the same name share it. `gpu_nodes` is the
    NUMA node of each visible GPU. Without GPUs, `slots` workers are assigned to the nodes in turn.
    """

    nodes: Mapping[int, frozenset[int]]
    packages: Mapping[int, str] = field(default_factory=dict)
    cores: Mapping[int, str] = field(default_factory=dict)
    caches: Mapping[int, str] = field(default_factory=dict)
    gpu_nodes: tuple[int, ...] = ()
    slots: int = 0

    @property
    def cpus(self) -> frozenset[int]:
        return frozenset().union(*self.nodes.values())


def cpu_set(binding: NumaBinding, index: int, topology: Topology) -> frozenset[int]:
    """The CPUs for the worker with local rank (and so GPU) `index`. Never empty: all CPUs if nothing is known.

    If there are more workers than GPUs, workers share the GPUs in turn, and the CPUs with them.
    """
    if not topology.nodes:
        return topology.cpus
    places = _places(topology, index)
    index %= len(places)
    node = places[index]
    cpus = topology.nodes.get(node, topology.cpus)
    # The worker's place among the workers of the same node.
    peers = [i for i, place in enumerate(places) if place == node]
    turn = peers.index(index)
    match binding:
        case NumaBinding.NODE:
            return cpus
        case NumaBinding.SOCKET:
            return _socket(cpus, topology)
        case NumaBinding.EXCLUSIVE:
            return _share(_groups(cpus, topology.cores), turn, len(peers))
        case NumaBinding.CORE_COMPLEX:
            # The largest complex first: this process may be allowed only some CPUs of a complex.
            complexes = sorted(_groups(cpus, topology.caches), key=lambda group: (-len(group), min(group)))
            return complexes[turn % len(complexes)]


def _places(topology: Topology, index: int) -> tuple[int, ...]:
    if topology.gpu_nodes:
        return topology.gpu_nodes
    nodes = sorted(topology.nodes)
    return tuple(nodes[rank % len(nodes)] for rank in range(max(topology.slots, index + 1)))


def _socket(cpus: frozenset[int], topology: Topology) -> frozenset[int]:
    package = topology.packages.get(min(cpus))
    if not package:
        return cpus
    nodes = [node for node in topology.nodes.values() if topology.packages.get(min(node)) == package]
    return frozenset().union(*nodes)


def _groups(cpus: Iterable[int], names: Mapping[int, str]) -> list[frozenset[int]]:
    """Groups of CPUs with the same name, in the order of their lowest CPU. A CPU without a name is alone."""
    groups: dict[str, set[int]] = {}
    for cpu in sorted(cpus):
        groups.setdefault(names.get(cpu) or f"cpu {cpu}", set()).add(cpu)
    return [frozenset(group) for group in groups.values()]


def _share(cores: list[frozenset[int]], turn: int, peers: int) -> frozenset[int]:
    """The CPUs of part `turn`, if the cores are split into `peers` parts. With fewer cores than parts, parts share one.

    The parts differ by one core at most, and the larger parts come first.
    """
    if len(cores) < peers:
        return cores[turn % len(cores)]
    size, larger = divmod(len(cores), peers)
    start = turn * size + min(turn, larger)
    return frozenset().union(*cores[start : start + size + (turn < larger)])


def read_topology(
    slots: int = 0,
    environ: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
    allowed: Iterable[int] | None = None,
) -> Topology:
    """Look at the host. `slots` workers share a host without GPUs; `environ` holds the variables that hide GPUs.

    `allowed` is this process's affinity unless given.
    """
    cpus = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
    system = root / "sys/devices/system"
    nodes: dict[int, frozenset[int]] = {}
    for folder in (system / "node").glob("node[0-9]*"):
        ours = ranges(_text(folder / "cpulist")) & cpus
        if ours:
            nodes[int(folder.name.removeprefix("node"))] = ours
    # A kernel without NUMA has no such folder. All CPUs are one node then.
    nodes = nodes or {0: cpus}
    folders = {cpu: system / f"cpu/cpu{cpu}" for cpu in cpus}
    first = min(nodes)
    return Topology(
        nodes=nodes,
        packages={cpu: _text(path / "topology/physical_package_id") for cpu, path in folders.items()},
        cores={cpu: _text(path / "topology/thread_siblings_list") for cpu, path in folders.items()},
        caches={cpu: _largest_cache(path / "cache") for cpu, path in folders.items()},
        # The driver says -1 on a host with one node.
        gpu_nodes=tuple(gpu.numa_node if gpu.numa_node >= 0 else first for gpu in visible(read_gpus(root), environ)),
        slots=slots,
    )


def ranges(text: str) -> frozenset[int]:
    """The CPUs in a list in the kernel's form, like `0-2,4`."""
    pairs = (part.partition("-") for part in text.split(",") if part.strip())
    return frozenset(
        cpu for first, _, last in pairs for cpu in range(int(first), min(int(last or first), _CPU_MAX) + 1)
    )


def _largest_cache(folder: Path) -> str:
    """The list of CPUs that share the highest level of cache, in the kernel's form. Instruction caches do not count."""
    found = [
        (int(_text(index / "level") or 0), _text(index / "shared_cpu_list"))
        for index in folder.glob("index*")
        if re.fullmatch("Unified|Data", _text(index / "type"))
    ]
    return max(found)[1] if found else ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
