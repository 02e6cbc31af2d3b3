"""What is judged of which facts: a row for each rule, on both sides of its limit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaunch.launcher.doctor.facts import (
    NO_LIMIT,
    AddressFacts,
    CgroupFacts,
    ClockFacts,
    CpuFacts,
    DiskFacts,
    GpuFacts,
    GpuProcess,
    GpuState,
    KernelLogFacts,
    LimitFacts,
    MemoryFacts,
    NameFacts,
    NamesFacts,
    Needs,
    PlaceFacts,
    PortFacts,
    RdmaFacts,
    StackFacts,
    StoreFacts,
    SystemFacts,
    TorchFacts,
    XidEvent,
)
from elaunch.launcher.doctor.findings import Finding, Grade, span, worst
from elaunch.launcher.doctor.judging import gpus, host, network

MIB, GIB = 1 << 20, 1 << 30
ONE, EIGHT = Needs(interpreter="python"), Needs(workers=8, nodes_max=4, interpreter="python")

LIMITS = LimitFacts(65536, 65536, 65536, 8 * MIB)
MEMORY = MemoryFacts(64 * GIB, 60 * GIB)
PLACE = PlaceFacts("TMPDIR", "/tmp", 100 * GIB, 50 * GIB, 10_000, write_s=0.01)
H100 = GpuState(0, "H100", 40, 90, "", 0, False, False, 0, 80 * GIB)
GPUS = GpuFacts("nvml", "570.1", "", 2, 2, "nvidia", (H100, replace(H100, index=1)))
TORCH = TorchFacts("python", "2.13", "12.8", "2.27.5", 2.0, 8, pairs=28)
STORE = StoreFacts("etcd:2379", "3.5.1", latencies_s=(0.001,) * 20, skew_from_s=-0.2, skew_to_s=0.3)
DOWN = StoreFacts("node0:2379", trouble="refused", why="Connection refused")
OWN = NameFacts("node-a", ("10.0.0.1",), 0.001)


def disk(**changes: object) -> DiskFacts:
    return DiskFacts((replace(PLACE, **changes),))  # type: ignore[arg-type]


def shm(free: int) -> DiskFacts:
    return DiskFacts((PlaceFacts("shared memory", "/dev/shm", free, free),))


def gpu(**changes: object) -> GpuFacts:
    return replace(GPUS, gpus=(replace(H100, **changes), replace(H100, index=1)))  # type: ignore[arg-type]


# The facts, the needs, the worst grade, and words of the finding with that grade.
HOST = [
    (host.judge_system, SystemFacts("0.1", "3.11", "python", "6.1.0-13-amd64"), ONE, "ok", "Linux 6.1.0"),
    (host.judge_system, SystemFacts("0.1", "3.11", "python", "4.18.0-553.el8"), ONE, "bad", "Linux 5.3"),
    (
        host.judge_system,
        SystemFacts("0.1", "3.11", "python", "6.1", "", "train.py does not exist"),
        ONE,
        "bad",
        "train",
    ),
    (host.judge_limits, LIMITS, EIGHT, "ok", "65536"),
    (host.judge_limits, replace(LIMITS, open_files=103), EIGHT, "bad", "need 104"),
    (host.judge_limits, replace(LIMITS, open_files=104), EIGHT, "warn", "ulimit -n 65536"),
    (host.judge_limits, replace(LIMITS, open_files=1535, open_files_hard=1535), EIGHT, "warn", "ulimit -n 1536"),
    (host.judge_limits, replace(LIMITS, open_files=NO_LIMIT, open_files_hard=NO_LIMIT), EIGHT, "ok", "no limit"),
    (host.judge_limits, replace(LIMITS, processes=319), EIGHT, "bad", "ulimit -u 2112"),
    (host.judge_limits, replace(LIMITS, processes=320), EIGHT, "warn", "ulimit -u 2112"),
    (host.judge_limits, replace(LIMITS, processes=100, is_exempt=True), EIGHT, "ok", "not for root"),
    (host.judge_limits, replace(LIMITS, stack=MIB - 1), ONE, "warn", "ulimit -s"),
    (host.judge_limits, replace(LIMITS, stack=NO_LIMIT), ONE, "ok", ""),
    (host.judge_memory, MEMORY, EIGHT, "ok", "60 GiB"),
    (host.judge_memory, replace(MEMORY, available=16 * GIB - 1), EIGHT, "warn", "2 GiB"),
    (host.judge_memory, replace(MEMORY, available=4 * GIB - 1), EIGHT, "bad", "need 4 GiB"),
    (host.judge_memory, replace(MEMORY, cgroup_free=GIB), EIGHT, "bad", "memory.max"),
    (host.judge_memory, replace(MEMORY, swap_used=2 * GIB), ONE, "warn", "swapoff"),
    (host.judge_memory, replace(MEMORY, overcommit=2), ONE, "warn", "overcommit_memory=0"),
    (host.judge_cpu, CpuFacts(16, 8, None, 3.0), EIGHT, "ok", "16 CPUs"),
    (host.judge_cpu, CpuFacts(16, 8, 2.5, 3.0), EIGHT, "warn", "cpu.max"),
    (host.judge_cpu, CpuFacts(4, 4), EIGHT, "warn", "more cores"),
    (host.judge_cpu, CpuFacts(16, 8, None, 25.0), EIGHT, "warn", "load"),
    (host.judge_shm, shm(2 * GIB), EIGHT, "ok", "2 GiB"),
    (host.judge_shm, shm(64 * MIB), ONE, "warn", "shm-size"),
    (host.judge_shm, shm(64 * MIB), EIGHT, "bad", "need 256 MiB"),
    (host.judge_shm, shm(256 * MIB), EIGHT, "warn", "2 GiB"),
    (host.judge_shm, DiskFacts((PlaceFacts("", "/dev/shm", error="Read-only file system"),)), ONE, "bad", "Read-only"),
    (host.judge_disk, disk(), ONE, "ok", "50 GiB"),
    (host.judge_disk, disk(error="Permission denied"), ONE, "bad", "another TMPDIR"),
    (host.judge_disk, disk(name="the current folder", error="not yours"), ONE, "warn", "owner"),
    (host.judge_disk, disk(free=63 * MIB), ONE, "bad", "63 MiB"),
    (host.judge_disk, disk(free=63 * MIB, name="torch's cache"), ONE, "warn", "63 MiB"),
    (host.judge_disk, disk(free=GIB - 1), ONE, "warn", "make room"),
    (host.judge_disk, disk(files_free=99), ONE, "bad", "99 more files"),
    (host.judge_disk, disk(files_free=None), ONE, "ok", ""),
    (host.judge_disk, disk(write_s=2.5), ONE, "warn", "2.5 s"),
    (host.judge_disk, disk(is_noexec=True), ONE, "warn", "noexec"),
    (host.judge_cgroup, CgroupFacts("/sys/fs/cgroup/x"), EIGHT, "ok", "/sys/fs/cgroup/x"),
    (host.judge_cgroup, CgroupFacts(error="it may not be written"), EIGHT, "warn", "may not be written"),
    (host.judge_cgroup, CgroupFacts("/x", pids_free=319), EIGHT, "bad", "319 threads"),
    (host.judge_cgroup, CgroupFacts("/x", pids_free=320), EIGHT, "warn", "pids.max"),
    (host.judge_stacks, StackFacts(), ONE, "warn", "pip install py-spy"),
    (host.judge_stacks, StackFacts("py-spy", "", 1, 0.1), ONE, "ok", "100 ms"),
    (host.judge_stacks, StackFacts("py-spy", "Operation not permitted", 3), ONE, "warn", "only a reboot ends"),
    (host.judge_stacks, StackFacts("py-spy", "Operation not permitted", 2), ONE, "warn", "ptrace_scope=1"),
    # Workers allow their agent: the scope is not why.
    (host.judge_stacks, StackFacts("py-spy", "Operation not permitted", 1), ONE, "warn", "as the workers' user"),
    (host.judge_stacks, StackFacts("py-spy", "Operation not permitted", 0), ONE, "warn", "cap-add"),
    (host.judge_clock, ClockFacts(True, 0.01), EIGHT, "ok", "10 ms"),
    (host.judge_clock, ClockFacts(False, 16.0), EIGHT, "warn", "chrony"),
    (host.judge_clock, ClockFacts(False, 16.0), ONE, "ok", "one node"),
    (host.judge_clock, ClockFacts(True, 2.0), EIGHT, "warn", "2 s"),
    (host.judge_clock, ClockFacts(), EIGHT, "ok", "does not say"),
]
DEVICES = [
    (gpus.judge_gpus, GpuFacts(), ONE, "ok", "no NVIDIA driver here"),
    (gpus.judge_gpus, GpuFacts(), replace(ONE, wants_gpus=True), "bad", "--gpus all"),
    (gpus.judge_gpus, GpuFacts(vendor="amd", nodes=8, visible=8), EIGHT, "ok", "8 AMD"),
    (gpus.judge_gpus, GPUS, ONE, "ok", "2 × H100, driver 570.1"),
    (gpus.judge_gpus, replace(GPUS, gpus=(), trouble="Driver/library version mismatch"), ONE, "bad", "mismatch"),
    (gpus.judge_gpus, replace(GPUS, source="", gpus=(), trouble="not installed"), ONE, "warn", "elaunch[gpu]"),
    (gpus.judge_gpus, replace(GPUS, nodes=3), ONE, "bad", "Xid 79"),
    (gpus.judge_gpus, GPUS, EIGHT, "warn", "share 2 GPU"),
    (gpus.judge_gpus, gpu(name="A100"), ONE, "warn", "differ"),
    (gpus.judge_gpus, gpu(uncorrected=3), ONE, "bad", "GPU 0 had 3 uncorrectable"),
    (gpus.judge_gpus, gpu(pending=True), ONE, "bad", "nvidia-smi --gpu-reset -i 0"),
    (gpus.judge_gpus, gpu(remap_failed=True), ONE, "bad", "RMA"),
    (gpus.judge_gpus, gpu(uncorrected=None, pending=None, remap_failed=None, slows_at_c=None), ONE, "ok", ""),
    (gpus.judge_gpus, gpu(temperature_c=90), ONE, "warn", "90 °C"),
    (gpus.judge_gpus, gpu(slowed_by="heat"), ONE, "warn", "heat"),
    (gpus.judge_gpus, gpu(processes=(GpuProcess(7, "python", GIB),)), ONE, "warn", "python (pid 7, 1 GiB)"),
    (gpus.judge_gpus, gpu(memory_used=2 * GIB), ONE, "warn", "no process seen"),
    (gpus.judge_kernel_log, KernelLogFacts(False), ONE, "ok", "not be read"),
    (gpus.judge_kernel_log, KernelLogFacts(True, (XidEvent(9, "0000:3B", 13),)), ONE, "ok", "no hardware error"),
    (gpus.judge_kernel_log, KernelLogFacts(True, (XidEvent(600, "0000:3B", 79),) * 2), ONE, "warn", "2 times"),
    (gpus.judge_rdma, RdmaFacts(), EIGHT, "ok", "no InfiniBand"),
    (gpus.judge_rdma, RdmaFacts((("mlx5_0:1", "ACTIVE"), ("mlx5_1:1", "DOWN"))), EIGHT, "ok", "1 of 2"),
    (gpus.judge_rdma, RdmaFacts((("mlx5_0:1", "DOWN"),)), EIGHT, "warn", "TCP"),
    (gpus.judge_rdma, RdmaFacts((("mlx5_0:1", "ACTIVE"),), 64 << 10), EIGHT, "warn", "ulimit -l"),
    (gpus.judge_rdma, RdmaFacts((("mlx5_0:1", "ACTIVE"),), 64 << 10, may_lock=True), EIGHT, "ok", "1 of 1"),
    (gpus.judge_torch, TORCH, EIGHT, "ok", "P2P between all"),
    (gpus.judge_torch, replace(TORCH, error="ModuleNotFoundError: No module named 'torch'"), ONE, "bad", "pip install"),
    (gpus.judge_torch, TORCH, replace(ONE, uses_python=False), "ok", "command"),
    (gpus.judge_torch, replace(TORCH, seconds=16.0), ONE, "warn", "local disk"),
    (gpus.judge_torch, replace(TORCH, cuda_error="driver too old"), ONE, "bad", "driver too old"),
    (gpus.judge_torch, replace(TORCH, peerless=4), ONE, "warn", "topo -m"),
    (gpus.judge_torch, replace(TORCH, peerless=28), ONE, "ok", "P2P between no"),
]
NETWORK = [
    (network.judge_names, NamesFacts(OWN), EIGHT, "ok", "10.0.0.1"),
    (network.judge_names, NamesFacts(replace(OWN, error="unknown")), EIGHT, "warn", "/etc/hosts"),
    (network.judge_names, NamesFacts(replace(OWN, error="unknown")), ONE, "ok", "none is needed"),
    (network.judge_names, NamesFacts(OWN, (NameFacts("x", error="unknown"),)), EIGHT, "bad", "--rdzv-endpoint"),
    (network.judge_names, NamesFacts(OWN, (replace(OWN, seconds=5.0),)), EIGHT, "warn", "resolv.conf"),
    (network.judge_address, AddressFacts("10.0.0.1", "eth0", 100_000), EIGHT, "ok", "(eth0, 100 Gbit/s)"),
    (network.judge_address, AddressFacts("10.0.0.1", "eth0", gloo="eth0"), EIGHT, "ok", "GLOO_SOCKET_IFNAME=eth0"),
    (network.judge_address, AddressFacts(error="there is no route to x"), EIGHT, "bad", "--local-addr"),
    (network.judge_ports, PortFacts("10.0.0.1"), EIGHT, "ok", "firewall"),
    (network.judge_ports, PortFacts("10.0.0.1", peer="node0", tried=(500, 501)), EIGHT, "ok", "at ports 500, 501"),
    (network.judge_ports, PortFacts("h", peer="a", tried=(1, 2), silent=(2,), why="x"), EIGHT, "warn", "ports 2 (x)"),
    (network.judge_ports, PortFacts("10.9.9.9", error="Cannot assign"), EIGHT, "bad", "--local-addr"),
    (network.judge_ports, PortFacts("10.0.0.1", (500, 501)), replace(EIGHT, ports=(500, 501)), "bad", "500 to 501"),
    (network.judge_ports, PortFacts("10.0.0.1", (500,)), replace(EIGHT, ports=(500, 501)), "ok", "1 of 2 free"),
    (
        *(network.judge_ports, PortFacts("h", ephemeral=(32768, 60999)), replace(EIGHT, ports=(40000,))),
        *("warn", "below 32768"),
    ),
    (network.judge_store, None, ONE, "ok", "no store"),
    (network.judge_store, STORE, EIGHT, "ok", "agree"),
    (network.judge_store, replace(STORE, latencies_s=(0.2,) * 20), EIGHT, "warn", "200 ms"),
    (network.judge_store, replace(STORE, latencies_s=(0.6,) * 20), EIGHT, "bad", "600 ms"),
    (network.judge_store, replace(STORE, skew_from_s=None, skew_to_s=None), EIGHT, "ok", "median 1 ms"),
    (network.judge_store, replace(STORE, skew_from_s=4.0, skew_to_s=5.0), EIGHT, "warn", "4.5 s behind"),
    (network.judge_store, replace(STORE, skew_from_s=-5.0, skew_to_s=-4.0), EIGHT, "warn", "4.5 s ahead of"),
    (network.judge_store, DOWN, EIGHT, "bad", "start the etcd"),
    (network.judge_store, replace(DOWN, is_served=True), EIGHT, "warn", "head has not started"),
    (network.judge_store, replace(DOWN, is_served=True, is_head=True), EIGHT, "ok", "this node would serve"),
    (network.judge_store, replace(DOWN, is_head=True, listen_error="in use"), EIGHT, "bad", "in use"),
    (network.judge_store, replace(DOWN, trouble="away"), EIGHT, "bad", "firewall"),
    (network.judge_store, replace(DOWN, trouble="denied", why="wrong token"), EIGHT, "bad", "wrong token"),
]


@pytest.mark.parametrize(("judge", "facts", "needs", "grade", "words"), [*HOST, *DEVICES, *NETWORK])
def test_facts_have_a_grade_and_a_way_out(judge: object, facts: object, needs: Needs, grade: str, words: str) -> None:
    findings: tuple[Finding, ...] = judge(facts, needs)  # type: ignore[operator]

    worst_of = worst(finding.grade for finding in findings)
    assert worst_of.value == grade, findings
    shown = " ".join(f"{each.found} {each.advice}" for each in findings if each.grade is worst_of)
    assert words in shown
    assert all(bool(each.advice) == (each.grade is not Grade.OK) for each in findings)


def test_a_torch_without_cuda_is_bad_only_where_there_are_gpus() -> None:
    cpu_build = replace(TORCH, cuda="", pairs=0)

    assert worst(each.grade for each in gpus.judge_torch(cpu_build, ONE, 0)) is Grade.OK
    assert worst(each.grade for each in gpus.judge_torch(cpu_build, ONE, 8)) is Grade.BAD


def test_times_are_in_words() -> None:
    assert [span(s) for s in (0.0123, 5, 600, 7200)] == ["12.3 ms", "5 s", "10 min", "2 h"]
