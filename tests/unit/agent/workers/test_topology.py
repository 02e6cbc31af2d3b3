"""Which CPUs a worker gets, in torchrun's modes."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest

from elaunch.agent.config import NumaBinding
from elaunch.agent.workers.topology import Topology, cpu_set, nvlink_domain, read_topology

ALL_MODES = list(NumaBinding)


def host(homes: tuple[int, ...] = (0, 0, 1, 1)) -> Topology:
    """Two sockets of two nodes each; a node is 4 cores with 2 threads (c, c + 16) and caches of 2 cores."""
    nodes = {n: frozenset(range(4 * n, 4 * n + 4)) | frozenset(range(16 + 4 * n, 20 + 4 * n)) for n in range(4)}
    cpus = range(32)
    return Topology(
        nodes,
        homes,
        packages={cpu: str(cpu % 16 // 8) for cpu in cpus},
        cores={cpu: f"{cpu % 16},{cpu % 16 + 16}" for cpu in cpus},
        caches={cpu: f"cache {cpu % 16 // 2}" for cpu in cpus},
    )


def test_node_is_all_cpus_of_the_gpus_node() -> None:
    assert cpu_set(NumaBinding.NODE, 2, host()) == {4, 5, 6, 7, 20, 21, 22, 23}


def test_socket_is_all_nodes_of_the_gpus_socket() -> None:
    assert cpu_set(NumaBinding.SOCKET, 0, host((3,))) == {*range(8, 16), *range(24, 32)}


def test_exclusive_divides_the_nodes_cores_and_the_first_get_one_more() -> None:
    shares = [cpu_set(NumaBinding.EXCLUSIVE, gpu, host((0, 0, 0, 1))) for gpu in range(4)]

    assert shares == [{0, 16, 1, 17}, {2, 18}, {3, 19}, {4, 5, 6, 7, 20, 21, 22, 23}]


def test_core_complex_is_one_cache_each_while_there_are_enough() -> None:
    sets = [cpu_set(NumaBinding.CORE_COMPLEX, gpu, host((1, 1, 1))) for gpu in range(3)]

    assert sets == [{4, 5, 20, 21}, {6, 7, 22, 23}, {4, 5, 20, 21}]


def test_workers_that_share_a_node_get_parts_of_it() -> None:
    topology = host((0, 1, 2, 3, 0, 1))

    assert cpu_set(NumaBinding.EXCLUSIVE, 0, topology) == {0, 16, 1, 17}
    assert cpu_set(NumaBinding.EXCLUSIVE, 4, topology) == {2, 18, 3, 19}
    assert cpu_set(NumaBinding.EXCLUSIVE, 3, topology) == topology.nodes[3]


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_set_is_never_empty_and_never_leaves_the_affinity(mode: NumaBinding) -> None:
    narrow = Topology({1: frozenset({5})}, homes=(0, 1, -1, 7))

    for topology in (narrow, host(), Topology({0: frozenset({3})}, homes=(0,))):
        for index in range(9):
            found = cpu_set(mode, index, topology)
            assert found
            assert found <= topology.cpus


def test_this_host_can_be_read_and_bound_to() -> None:
    topology = read_topology(2, os.environ)

    assert topology.cpus <= os.sched_getaffinity(0)
    assert all(cpu_set(mode, 0, topology) for mode in ALL_MODES)


class Nvml:
    """A stand-in for NVIDIA's library, which reports `info`."""

    def __init__(self, info: bytes, failed: int = 0) -> None:
        self.info, self.failed, self.opened = info, failed, 0

    def nvmlInit_v2(self) -> int:
        self.opened += 1
        return 0

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: object) -> int:
        return index

    def nvmlDeviceGetGpuFabricInfoV(self, device: object, info: Any) -> int:
        assert struct.unpack("=I", info.raw[:4]) == (0x02000024,)
        info.raw = self.info
        return self.failed


# The nvmlGpuFabricInfo_v2_t of a GPU in a rack whose hosts share NVLink: ClusterUUID, no error, clique 7, completed.
FABRIC = bytes.fromhex("24000002" + "00ff" * 8 + "00000000" + "07000000" + "03000000" + "00000000")


@pytest.mark.parametrize(
    ("info", "failed", "domain"),
    [
        (FABRIC, 0, f"{'00ff' * 8}.7"),
        (FABRIC, 3, ""),
        (FABRIC[:4] + bytes(16) + FABRIC[20:], 0, ""),
        (FABRIC[:28] + b"\2" + FABRIC[29:], 0, ""),
    ],
    ids=["known", "not supported", "no cluster", "in progress"],
)
def test_the_nvlink_domain_is_the_cluster_and_the_clique(
    monkeypatch: pytest.MonkeyPatch, info: bytes, failed: int, domain: str
) -> None:
    library = Nvml(info, failed)
    monkeypatch.setattr("ctypes.CDLL", {"libnvidia-ml.so.1": library}.__getitem__)

    assert nvlink_domain() == domain
    assert library.opened == 0


def test_without_a_driver_there_is_no_nvlink_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())

    assert nvlink_domain() == "", "the driver is too old"


def test_the_topology_is_read_from_sysfs_within_the_affinity_and_the_visible_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")

    for node, cpus in ((0, "0-1"), (1, "2-3"), (2, "")):
        write(f"sys/devices/system/node/node{node}/cpulist", cpus)
    for cpu in range(4):
        base = f"sys/devices/system/cpu/cpu{cpu}"
        write(f"{base}/topology/physical_package_id", "0")
        write(f"{base}/topology/thread_siblings_list", f"{cpu}")
        for index, (kind, level, shared) in enumerate(
            (("Data", 1, f"{cpu}"), ("Instruction", 4, "0-3"), ("Unified", 3, "0-1" if cpu < 2 else "2-3"))
        ):
            write(f"{base}/cache/index{index}/type", kind)
            write(f"{base}/cache/index{index}/level", str(level))
            write(f"{base}/cache/index{index}/shared_cpu_list", shared)
    for minor, (address, node) in enumerate((("0000:0a:00.0", 0), ("0000:1b:00.0", 1))):
        write(f"dev/nvidia{minor}", "")
        write(f"proc/driver/nvidia/gpus/{address}/information", f"Device Minor: {minor}")
        write(f"sys/bus/pci/devices/{address}/numa_node", str(node))

    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {1, 2, 3})
    topology = read_topology(3, {"CUDA_VISIBLE_DEVICES": "1,0"}, tmp_path)
    without_gpus = read_topology(3, {"CUDA_VISIBLE_DEVICES": ""}, tmp_path)

    assert topology.nodes == {0: {1}, 1: {2, 3}}
    assert topology.caches == {1: "0-1", 2: "2-3", 3: "2-3"}
    assert topology.packages == {1: "0", 2: "0", 3: "0"}
    assert topology.homes == (1, 0)
    assert without_gpus.homes == (0, 1, 0)
