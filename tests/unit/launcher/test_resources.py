"""Counting CPUs, cores and GPUs from what the kernel and the environment say."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from elaunch.agent.workers.gpus import Gpu, Vendor, read_gpus, visible
from elaunch.launcher.resources import (
    detect,
    interpreter_options,
    physical_cores,
    read_quota_cpus,
    within_quota,
)

UUIDS = ("GPU-aaaa1111-0", "GPU-aaaa2222-0", "GPU-bbbb3333-0", "GPU-cccc4444-0")
NVIDIA = tuple(Gpu(Vendor.NVIDIA, uuid) for uuid in UUIDS)
AMD = tuple(Gpu(Vendor.AMD, uuid) for uuid in UUIDS)


def write(root: Path, path: str, text: str = "") -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def numbers(gpus: tuple[Gpu, ...], **environ: str) -> list[int]:
    return [gpus.index(gpu) for gpu in visible(gpus, environ)]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("0,1", [0, 1]),
        ("3, 1", [3, 1]),
        ("", []),
        ("-1", []),
        ("0,-1,2", [0]),
        ("0,9,1", [0]),
        ("NoDevFiles", []),
        ("1,1", []),
        ("GPU-bbbb", [2]),
        ("GPU-cccc4444-0,GPU-bbbb3333-0", [3, 2]),
        ("GPU-aaaa", []),
        ("GPU-bbbb,GPU-ffff,GPU-cccc", [2]),
        ("MIG-1,MIG-2", [0]),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(variable: str, expected: list[int]) -> None:
    assert numbers(NVIDIA, CUDA_VISIBLE_DEVICES=variable) == expected


def test_without_a_variable_all_gpus_are_visible() -> None:
    assert numbers(NVIDIA) == [0, 1, 2, 3]
    assert numbers(NVIDIA, HIP_VISIBLE_DEVICES="0") == [0, 1, 2, 3]
    assert visible((), {"CUDA_VISIBLE_DEVICES": "0,1"}) == ()


def test_uuids_are_believed_where_the_driver_tells_none() -> None:
    nameless = (Gpu(Vendor.NVIDIA),) * 4

    assert len(visible(nameless, {"CUDA_VISIBLE_DEVICES": "GPU-x,GPU-y"})) == 2
    assert len(visible(nameless, {"CUDA_VISIBLE_DEVICES": "1,1"})) == 0


def test_amds_variables_narrow_one_after_the_other() -> None:
    assert numbers(AMD, ROCR_VISIBLE_DEVICES="3,2,1", HIP_VISIBLE_DEVICES="0,2") == [3, 1]
    assert numbers(AMD, CUDA_VISIBLE_DEVICES="1") == [1]
    assert numbers(AMD, CUDA_VISIBLE_DEVICES="1", HIP_VISIBLE_DEVICES="2") == [2]


def test_nvidia_gpus_are_counted_by_usable_device_nodes_and_described_by_the_driver(tmp_path: Path) -> None:
    for node in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        write(tmp_path, f"dev/{node}")
    # The GPUs are in the order of their bus addresses, which is not that of the minor numbers.
    for address, minor, numa in (("0000:1B:00.0", 1, 1), ("0000:0a:00.0", 2, 0), ("0000:ff:00.0", 0, 1)):
        text = f"Model: \t\t H200\nGPU UUID: \t GPU-{minor}-abc\nDevice Minor: \t {minor}\n"
        write(tmp_path, f"proc/driver/nvidia/gpus/{address}/information", text)
        write(tmp_path, f"sys/bus/pci/devices/{address.lower()}/numa_node", f"{numa}\n")

    gpus = read_gpus(tmp_path, usable=lambda node: node.name != "nvidia0")

    assert gpus == (Gpu(Vendor.NVIDIA, "GPU-2-abc", 0), Gpu(Vendor.NVIDIA, "GPU-1-abc", 1))


def test_device_nodes_alone_are_counted_too(tmp_path: Path) -> None:
    write(tmp_path, "dev/nvidia0")
    write(tmp_path, "dev/nvidia12")

    assert read_gpus(tmp_path, usable=lambda node: True) == (Gpu(Vendor.NVIDIA),) * 2


def test_amd_gpus_are_topology_nodes_with_simd_units_and_a_usable_render_node(tmp_path: Path) -> None:
    base = "sys/class/kfd/kfd/topology/nodes"
    write(tmp_path, f"{base}/0/properties", "cpu_cores_count 64\nsimd_count 0\n")
    write(tmp_path, f"{base}/10/properties", "simd_count 304\ndrm_render_minor 129\n")
    write(tmp_path, f"{base}/9/properties", "simd_count 304\ndrm_render_minor 128\nunique_id 255\n")
    write(tmp_path, f"{base}/11/properties", "simd_count 304\ndrm_render_minor 130\n")
    write(tmp_path, "sys/class/drm/renderD128/device/numa_node", "1\n")

    gpus = read_gpus(tmp_path, usable=lambda node: node.name != "renderD130")

    assert gpus == (Gpu(Vendor.AMD, "GPU-00000000000000ff", 1), Gpu(Vendor.AMD, "", -1))


def test_hardware_threads_of_one_core_are_one_core() -> None:
    siblings = {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5"}

    assert physical_cores([0, 4, 1, 5], siblings) == 2
    assert physical_cores([0, 1, 7], siblings) == 3


@pytest.mark.parametrize(("quota", "cores"), [(None, 8), (100.0, 8), (2.5, 2), (0.5, 1)])
def test_a_cpu_quota_limits_the_cores(quota: float | None, cores: int) -> None:
    assert within_quota(8, quota) == cores


def test_the_tightest_quota_of_a_v2_group_and_those_above_it_counts(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/job/step\n")
    write(tmp_path, "sys/fs/cgroup/job/step/cpu.max", "max 100000\n")
    write(tmp_path, "sys/fs/cgroup/job/cpu.max", "350000 100000\n")

    assert read_quota_cpus(tmp_path) == 3.5


def test_the_quota_of_a_v1_group_counts_where_its_mount_hides_the_path(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "4:memory:/x\n3:cpuacct,cpu:/docker/abc\n0::/\n")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "200000\n")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n")

    assert read_quota_cpus(tmp_path) == 2.0


def test_no_quota_is_none(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "3:cpu:/\n")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")

    assert read_quota_cpus(tmp_path) is None
    assert read_quota_cpus(tmp_path / "nothing") is None


def test_this_host_is_described_without_torch() -> None:
    host = detect(os.environ)

    assert host.cpus == len(os.sched_getaffinity(0))
    assert 1 <= host.cores <= host.cpus
    assert host.python == sys.executable


def test_the_gpus_counted_are_those_that_torch_counts() -> None:
    import torch

    assert detect(os.environ).gpus == torch.cuda.device_count()


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["/venv/bin/elaunch", "-W", "error", "train.py"], ()),
        (["-W", "error", "-Xdev", "-m", "elaunch", "-X", "of the script's"], ("-W", "error", "-X", "dev")),
        (["-OO", "-bB", "-melaunch"], ("-O", "-O", "-b", "-B")),
        # In the first line of an installed command: how the launcher itself is kept from its user's packages.
        (["-sE", "/usr/bin/elaunch", "train.py"], ()),
        (["-I", "-uvWignore", "--check-hash-based-pycs", "never", "-Xdev", "a.py"], ("-W", "ignore", "-X", "dev")),
        (["-c", "import sys", "-X", "dev"], ()),
        (["-W"], ("-W", "")),
        ([], ()),
    ],
)
def test_workers_get_the_interpreters_options_that_are_not_about_the_launcher(
    words: list[str], kept: tuple[str, ...]
) -> None:
    assert interpreter_options(words) == kept
