"""launcher.host: CPUs, cores and GPUs, this host's addresses, and what gloo must be given."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest

from elaunch.agent.workers.topology import Gpu, Vendor, read_gpus, visible
from elaunch.launcher import host
from elaunch.launcher.errors import UsageError
from elaunch.launcher.host import (
    NoAddress,
    Owner,
    gloo_variables,
    own_address,
    owner_of,
    read_quota_cpus,
    routable_addresses,
)
from elaunch.rendezvous.dial import HostAddress
from elaunch.rendezvous.endpoint import Endpoint

UUIDS = ("GPU-aaaa1111-0", "GPU-aaaa2222-0", "GPU-bbbb3333-0", "GPU-cccc4444-0")
NVIDIA = tuple(Gpu(uuid) for uuid in UUIDS)
AMD = tuple(Gpu(uuid, vendor=Vendor.AMD) for uuid in UUIDS)


def write(root: Path, path: str, text: str = "") -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def numbers(gpus: tuple[Gpu, ...], **environ: str) -> list[int]:
    return [gpus.index(gpu) for gpu in visible(gpus, environ)]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("0,1", [0, 1]),
        ("", []),
        ("-1", []),
        ("0,-1,2", [0]),
        ("NoDevFiles", []),
        ("1,1", []),
        ("GPU-cccc4444-0,GPU-bbbb3333-0", [3, 2]),
        ("GPU-bbbb,GPU-ffff,GPU-cccc", [2]),
        ("MIG-1,MIG-2", [0]),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(variable: str, expected: list[int]) -> None:
    assert numbers(NVIDIA, CUDA_VISIBLE_DEVICES=variable) == expected


def test_amds_variables_narrow_one_after_the_other() -> None:
    assert numbers(AMD, ROCR_VISIBLE_DEVICES="3,2,1", HIP_VISIBLE_DEVICES="0,2") == [3, 1]
    assert numbers(AMD, CUDA_VISIBLE_DEVICES="1") == [1]
    assert numbers(AMD, CUDA_VISIBLE_DEVICES="1", HIP_VISIBLE_DEVICES="2") == [2]
    assert numbers(AMD, ROCR_VISIBLE_DEVICES="0,GPU-CCCC4444-0") == [0, 3]


def test_nvidia_gpus_are_counted_by_usable_device_nodes_and_described_by_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        write(tmp_path, f"dev/{node}")
    # The GPUs are in the order of their bus addresses, which is not that of the minor numbers.
    for address, minor, numa in (("0000:1B:00.0", 1, 1), ("0000:0a:00.0", 2, 0), ("0000:ff:00.0", 0, 1)):
        text = f"Model: \t\t H200\nGPU UUID: \t GPU-{minor}-abc\nDevice Minor: \t {minor}\n"
        write(tmp_path, f"proc/driver/nvidia/gpus/{address}/information", text)
        write(tmp_path, f"sys/bus/pci/devices/{address.lower()}/numa_node", f"{numa}\n")

    monkeypatch.setattr("elaunch.agent.workers.topology._is_usable", lambda node: node.name != "nvidia0")
    gpus = read_gpus(tmp_path)

    assert gpus == (Gpu("GPU-2-abc", 0), Gpu("GPU-1-abc", 1))


def test_amd_gpus_are_topology_nodes_with_simd_units_and_a_usable_render_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = "sys/class/kfd/kfd/topology/nodes"
    write(tmp_path, f"{base}/0/properties", "cpu_cores_count 64\nsimd_count 0\n")
    write(tmp_path, f"{base}/10/properties", "simd_count 304\ndrm_render_minor 129\n")
    write(tmp_path, f"{base}/9/properties", "simd_count 304\ndrm_render_minor 128\nunique_id 255\n")
    write(tmp_path, f"{base}/11/properties", "simd_count 304\ndrm_render_minor 130\n")
    write(tmp_path, "sys/class/drm/renderD128/device/numa_node", "1\n")

    monkeypatch.setattr("elaunch.agent.workers.topology._is_usable", lambda node: node.name != "renderD130")
    gpus = read_gpus(tmp_path)
    monkeypatch.setattr("elaunch.agent.workers.topology._is_usable", lambda node: node.name != "kfd")

    assert gpus == (Gpu("GPU-00000000000000ff", 1, vendor=Vendor.AMD), Gpu("", -1, vendor=Vendor.AMD))
    assert read_gpus(tmp_path) == (), "render nodes alone only play videos"


def device(root: Path, node: str, kind: str, address: str, vendor: str, *parts: str) -> None:
    """One accelerator in a made-up tree: its device node, and its PCI device with `parts`."""
    pci = root / "sys/devices" / address
    write(pci, "vendor", f"{vendor}\n")
    for part in parts:
        (pci / part).mkdir(parents=True)
    write(root, f"dev/{node}")
    (root / "sys/class" / kind / Path(node).name).mkdir(parents=True)
    (root / "sys/class" / kind / Path(node).name / "device").symlink_to(pci)


def counted(root: Path, kind: str = "", **environ: str) -> int:
    return len(visible(read_gpus(root, kind), environ))


def test_intels_cards_count_by_tiles_and_the_gpu_in_the_processor_only_as_the_only_xpu(tmp_path: Path) -> None:
    device(tmp_path, "dri/renderD128", "drm", "0000:00:02.0", "0x8086", "drm/card0/gt/gt0", "drm/card0/gt/gt1")
    device(tmp_path, "dri/renderD131", "drm", "0000:07:00.0", "0x1a03")
    assert (counted(tmp_path), counted(tmp_path, "xpu")) == (0, 1)

    device(tmp_path, "dri/renderD129", "drm", "0000:3a:00.0", "0x8086", "tile0/gt0", "tile0/gt1", "tile1/gt0")
    device(tmp_path, "dri/renderD130", "drm", "0000:9a:00.0", "0x8086", "drm/card2/gt/gt0", "drm/card2/gt/gt1")
    assert (counted(tmp_path), counted(tmp_path, "xpu"), counted(tmp_path, "npu")) == (4, 4, 0)
    assert counted(tmp_path, ZE_FLAT_DEVICE_HIERARCHY="COMPOSITE") == 2
    assert counted(tmp_path, ZE_AFFINITY_MASK="0, 3,9") == 2
    assert counted(tmp_path, ZE_AFFINITY_MASK="0.0,0.1", ZE_FLAT_DEVICE_HIERARCHY="COMPOSITE") == 1
    assert counted(tmp_path, ZE_AFFINITY_MASK="0.0,0.1") == 0, "tiles have no parts"
    assert counted(tmp_path, ZE_AFFINITY_MASK="1,2,3", ONEAPI_DEVICE_SELECTOR="Level_Zero:0,2") == 2
    assert counted(tmp_path, ONEAPI_DEVICE_SELECTOR="level_zero:gpu") == 4


def test_ascend_devices_are_numbered_nodes_and_the_first_wrong_number_ends_the_list(tmp_path: Path) -> None:
    for node in ("davinci0", "davinci1", "davinci10", "davinci_manager"):
        write(tmp_path, f"dev/{node}")

    assert (counted(tmp_path), counted(tmp_path, "npu"), counted(tmp_path, "xpu")) == (3, 3, 0)
    assert counted(tmp_path, ASCEND_RT_VISIBLE_DEVICES="0,2") == 2
    assert counted(tmp_path, ASCEND_RT_VISIBLE_DEVICES="1,7,0") == 1
    assert counted(tmp_path, ASCEND_RT_VISIBLE_DEVICES="0, 1,2") == 1
    # The container runtime has mounted these devices.
    assert counted(tmp_path, ASCEND_VISIBLE_DEVICES="4,5,14") == 3


def test_gaudi_devices_are_accelerators_of_habanas(tmp_path: Path) -> None:
    for number, vendor in enumerate(("0x1da3", "0x1da3", "0x8086", "0x1da3")):
        device(tmp_path, f"accel/accel{number}", "accel", f"0000:{number}a:00.0", vendor)
    write(tmp_path, "dev/accel/accel_controlD0")

    assert (counted(tmp_path), counted(tmp_path, "hpu")) == (3, 3)
    assert counted(tmp_path, HABANA_VISIBLE_DEVICES="0", HABANA_VISIBLE_MODULES="5,7") == 2
    assert counted(tmp_path, HABANA_VISIBLE_MODULES="ALL") == 3


def test_the_tightest_quota_of_a_v2_group_and_those_above_it_counts(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/job/step\n")
    write(tmp_path, "sys/fs/cgroup/job/step/cpu.max", "max 100000\n")
    write(tmp_path, "sys/fs/cgroup/job/cpu.max", "350000 100000\n")

    assert read_quota_cpus(tmp_path) == 3.5


def test_workers_get_the_interpreters_options_that_are_not_about_the_launcher() -> None:
    program = "from elaunch.launcher.host import interpreter_options as found; print(*found())"
    argv = ("-I", "-Werror", "-Xmine=1", "-Xalso", "-OO", "-B")

    done = subprocess.run([sys.executable, *argv, "-c", program], capture_output=True, text=True, timeout=60)

    assert done.stdout.split() == ["-Werror", "-Xmine=1", "-Xalso", "-OO", "-B"], done.stderr


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The names that the resolver knows, made up by the test."""
    known: dict[str, list[str]] = {}
    resolve = host.resolve

    def answer(name: str, port: int, wait_s: float) -> list[HostAddress]:
        return [found for address in known.get(name, [name]) for found in resolve(address, port, wait_s)]

    monkeypatch.setattr(host, "resolve", answer)
    return known


def test_a_name_is_ours_if_all_its_addresses_can_be_bound_here(names: dict[str, list[str]]) -> None:
    names.update(me=["127.0.0.1", "::1"], they=["192.0.2.77"], all=["127.0.0.1", "192.0.2.77"])

    assert owner_of("me") is Owner.THIS_HOST
    assert owner_of("they") is Owner.OTHER_HOST
    assert owner_of("all") is Owner.SEVERAL_HOSTS


def test_a_name_that_is_loopback_here_alone_gives_an_address_that_others_reach(names: dict[str, list[str]]) -> None:
    names["host0"] = ["127.0.1.1"]

    expected = routable_addresses()

    assert own_address([Endpoint("host0", 9)]) == (expected[0] if expected else "127.0.1.1")


def test_an_address_that_cannot_be_used_without_ipv6_does_not_count(
    names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    names.update(localhost=["::1", "127.0.0.1"], host0=["2001:db8::7", "127.0.0.1"], v6=["2001:db8::7"])
    monkeypatch.setattr(host, "can_be_bound", lambda address: ":" not in address)
    monkeypatch.setattr(host, "by_interface", lambda: iter(()))

    assert [host.addresses(name) for name in names] == [["127.0.0.1"], ["127.0.0.1"], ["2001:db8::7"]]


def test_of_several_interfaces_none_is_guessed(names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    names["host0"] = ["127.0.1.1"]
    monkeypatch.setattr(host, "routable_addresses", lambda: ["10.9.8.7", "10.9.9.7"])

    with pytest.raises(
        UsageError,
        match=r"several other addresses \(10.9.8.7, 10.9.9.7\); give the one .* with --local-addr",
    ):
        own_address([Endpoint("host0", 9)])


@pytest.fixture
def own_addresses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses of this host's own name. If the list is empty, the name is unknown."""
    known: list[str] = []

    def answer(name: str, wait_s: float) -> list[str]:
        assert name == "node-a"
        if not known:
            raise NoAddress("unknown")
        return known

    monkeypatch.setattr(socket, "gethostname", lambda: "node-a")
    monkeypatch.setattr(host, "addresses", answer)
    monkeypatch.setattr(host, "interface_of", {"10.0.0.1": "eth1"}.get)
    return known


def test_rpc_gets_the_same_interface_and_the_users_own_variables_stay(own_addresses: list[str]) -> None:
    own_addresses += ["127.0.1.1", "10.0.0.1"]
    logged: list[str] = []

    quiet = gloo_variables("10.0.0.1", {}, logged.append, verbose=False)
    assert logged == []
    both = gloo_variables("10.0.0.1", {}, logged.append, verbose=True)
    only_rpc = gloo_variables("10.0.0.1", {"GLOO_SOCKET_IFNAME": "mine"}, logged.append, verbose=True)
    neither = gloo_variables(
        "10.0.0.1", {"GLOO_SOCKET_IFNAME": "a", "TP_SOCKET_IFNAME": "b"}, logged.append, verbose=True
    )

    assert quiet == both == {"GLOO_SOCKET_IFNAME": "eth1", "TP_SOCKET_IFNAME": "eth1"}
    assert (only_rpc, neither) == ({"TP_SOCKET_IFNAME": "eth1"}, {})
    assert logged == [
        "GLOO_SOCKET_IFNAME=eth1 is set for the workers: this host resolves its own name, node-a, to 127.0.1.1"
    ]


def test_on_one_host_a_resolver_that_does_not_answer_is_not_waited_for_by_the_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolved: list[object] = []
    answer = threading.Event()

    def hang(address: object, *_: object) -> NoReturn:
        resolved.append(address)
        answer.wait(180)
        raise socket.gaierror(socket.EAI_AGAIN, "too late")

    real = socket.getaddrinfo

    def lookup(host: Any, *rest: Any, **options: Any) -> Any:
        return real(host, *rest, **options) if options.get("flags") else hang(host)

    monkeypatch.setattr(socket, "gethostname", lambda: "node-a")
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(socket, "getnameinfo", hang)
    monkeypatch.setattr(host, "_OWN_NAME_S", 0.05)
    logged: list[str] = []
    try:
        found = gloo_variables("127.0.0.1", {"TP_SOCKET_IFNAME": "mine"}, logged.append, verbose=False)
        own = gloo_variables("127.0.0.1", {**found, "TP_SOCKET_IFNAME": "mine"}, logged.append, verbose=True)
    finally:
        answer.set()

    assert ("::ffff:127.0.0.1", 0) in resolved
    assert found == {"GLOO_SOCKET_IFNAME": "lo", "RES_OPTIONS": "timeout:1 attempts:2"}
    assert [line.split(" is set for the workers: ")[0] for line in logged] == [
        "GLOO_SOCKET_IFNAME=lo",
        "RES_OPTIONS='timeout:1 attempts:2'",
    ]
    assert own == {}
