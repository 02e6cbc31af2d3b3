"""The GPUs and CPUs that this node's workers may use: which GPUs are visible, and which CPUs are near them.

GPUs are found without initializing CUDA: by device nodes and variables that hide some. All accelerators are called
GPUs here. The modes of CPU binding are torchrun's (torch/numa/binding.py), without numactl.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from elaunch.agent.config import NumaBinding
from elaunch.agent.linux import text_of

# Linux can be built for 8192 CPUs at most; this is eight times as many.
_CPU_MAX = (1 << 16) - 1
# nvmlGpuFabricInfo_v2_t (nvml.h): version, ClusterUUID, status, clique, state, health.
_FABRIC_INFO, _FABRIC_COMPLETED = "=I16siIB3xI", 3
# PCI vendors, and the address of the GPU in Intel's processors.
_INTEL, _HABANA, _IN_PROCESSOR = "0x8086", "0x1da3", "0000:00:02.0"


class Vendor(Enum):
    """Each vendor has its own variables that hide GPUs."""

    NVIDIA = "NVIDIA"
    AMD = "AMD"
    ASCEND = "Ascend"
    GAUDI = "Gaudi"
    INTEL = "Intel"


@dataclass(frozen=True)
class Gpu:
    """One GPU. `uuid` is empty and `numa_node` is -1 if not known. An Intel `card` may have several GPUs."""

    uuid: str = ""
    numa_node: int = -1
    vendor: Vendor = Vendor.NVIDIA
    card: int = 0


def visible(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that the runtime will number 0, 1, …: all of them, or those that the variables choose, in that order.

    `gpus` are those of one vendor. Container runtimes' variables (ASCEND_VISIBLE_DEVICES, HABANA_VISIBLE_DEVICES) do
    not count: the device nodes that they name are mounted.
    """
    match gpus[0].vendor if gpus else None:
        case Vendor.AMD:
            # ROCm's runtime selects first, and HIP then selects from the rest. HIP reads CUDA's variable if its own is
            # missing.
            amd = _chosen(gpus, environ.get("ROCR_VISIBLE_DEVICES"))
            return _chosen(amd, environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES")))
        case Vendor.ASCEND:
            # A space ends the list too.
            return _chosen(gpus, environ.get("ASCEND_RT_VISIBLE_DEVICES", "").partition(" ")[0] or None)
        case Vendor.GAUDI:
            # Which ones they are is not known: modules have numbers of their own.
            modules = environ.get("HABANA_VISIBLE_MODULES", "").lower()
            return tuple(gpus if modules in ("", "all") else gpus[: len({*re.findall("[0-9]+", modules)})])
        case Vendor.INTEL:
            return _unmasked(gpus, environ)
        case _:
            return _chosen(gpus, environ.get("CUDA_VISIBLE_DEVICES"))


def _unmasked(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Intel's GPUs as Level Zero lists them: each tile of a card is a device, or with COMPOSITE each card.

    The mask names devices. `0.1` is a part of card 0, which then is a device with that part only; a tile has no parts,
    and such an entry does not count. SYCL (and so torch) selects from the rest; only its numeric form is read here.
    """
    is_whole = environ.get("ZE_FLAT_DEVICE_HIERARCHY", "").upper() == "COMPOSITE"
    devices = list(dict.fromkeys(gpus)) if is_whole else gpus
    if mask := environ.get("ZE_AFFINITY_MASK", ""):
        chosen = [(entry.partition(".")[0] if is_whole else entry).strip() for entry in mask.split(",")]
        devices = [gpu for index, gpu in enumerate(devices) if str(index) in chosen]
    selector = re.fullmatch("level_zero:([0-9,]+)", environ.get("ONEAPI_DEVICE_SELECTOR", ""), re.IGNORECASE)
    return tuple(gpu for index, gpu in enumerate(devices) if not selector or str(index) in selector[1].split(","))


def _chosen(gpus: Sequence[Gpu], variable: str | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA would choose: the entries before the first invalid one, or none if an entry is there twice."""
    if variable is None:
        return tuple(gpus)
    found: list[int] = []
    for entry in variable.split(","):
        name = entry.strip()
        if name.startswith("MIG-"):
            # CUDA gives a process one MIG instance, however many are listed.
            return tuple(gpus[:1])
        index = _index(name, gpus)
        if index is None:
            break
        if index in found and (gpus[index].uuid or name.isdigit()):
            return ()
        found.append(index)
    return tuple(gpus[index] for index in found)


def _index(name: str, gpus: Sequence[Gpu]) -> int | None:
    if re.fullmatch(r"[0-9]+", name):
        return int(name) if int(name) < len(gpus) else None
    if not name.startswith("GPU-"):
        return None
    # ROCm's documentation writes them in upper case.
    matches = [i for i, gpu in enumerate(gpus) if gpu.uuid.lower().startswith(name.lower())]
    if len(matches) == 1:
        return matches[0]
    # This driver reports no UUIDs, so the entry cannot be checked.
    return 0 if gpus and not any(gpu.uuid for gpu in gpus) else None


def read_gpus(root: Path = Path("/"), kind: str = "") -> tuple[Gpu, ...]:
    """The GPUs of this host (or container) of one vendor: that of `kind`, else the first that has any.

    NVIDIA's are in the order of their PCI addresses, AMD's in that of their KFD nodes.
    """
    readers = (KINDS[kind],) if kind in KINDS else (_read_nvidia, _read_amd, _read_ascend, _read_gaudi, _read_intel)
    gpus = next(filter(None, (read(root) for read in readers)), ())
    # As in torch.xpu, a GPU in the processor is a device if there is no other.
    return gpus or (_read_intel(root, integrated=True) if kind == "xpu" else ())


def nvlink_domain() -> str:
    """ClusterUUID and clique of this host's first GPU: hosts that have the same are connected by NVLink.

    Empty without that, and if the driver does not report it.
    """
    from ctypes import CDLL, byref, c_void_p, create_string_buffer

    size = struct.calcsize(_FABRIC_INFO)
    # The version of a structure is its size, and its number in the highest byte.
    device, info = c_void_p(), create_string_buffer(struct.pack(_FABRIC_INFO, size | 2 << 24, b"", 0, 0, 0, 0), size)
    try:
        nvml = CDLL("libnvidia-ml.so.1")
        query = nvml.nvmlDeviceGetGpuFabricInfoV
        failed = nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByIndex_v2(0, byref(device)) or query(device, info)
        nvml.nvmlShutdown()
    except (OSError, AttributeError):
        # No driver, or one that is older than the function.
        return ""
    _, uuid, status, clique, state, _ = struct.unpack(_FABRIC_INFO, info.raw)
    is_known = not failed and not status and state == _FABRIC_COMPLETED and any(uuid)
    return f"{uuid.hex()}.{clique}" if is_known else ""


def _is_usable(node: Path) -> bool:
    """Whether the device node may be opened. The kernel checks without opening it, device cgroups included."""
    return os.access(node, os.R_OK | os.W_OK)


def _read_nvidia(root: Path) -> tuple[Gpu, ...]:
    minors = {
        int(node.name.removeprefix("nvidia"))
        for node in (root / "dev").glob("nvidia[0-9]*")
        if re.fullmatch(r"nvidia[0-9]+", node.name) and _is_usable(node)
    }
    gpus: list[Gpu] = []
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        facts = _facts(folder / "information", ":")
        minor = facts.get("Device Minor", "")
        if minor.isdigit() and int(minor) in minors:
            minors.remove(int(minor))
            uuid = facts.get("GPU UUID", "")
            node = _number(root / "sys/bus/pci/devices" / folder.name.lower() / "numa_node")
            gpus.append(Gpu(uuid if re.fullmatch(r"GPU-[0-9a-f-]+", uuid) else "", node))
    return (*gpus, *(Gpu() for _ in minors))


def _read_amd(root: Path) -> tuple[Gpu, ...]:
    gpus: list[Gpu] = []
    # A container may have render nodes, for video, without /dev/kfd, for compute.
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*") if _is_usable(root / "dev/kfd") else ()
    for folder in sorted(nodes, key=lambda path: path.name.zfill(8)):
        facts = _facts(folder / "properties", " ")
        minor = facts.get("drm_render_minor", "0")
        render = f"renderD{minor}"
        # CPUs are nodes too, but have no SIMD units. A GPU of another container has no render node here.
        if facts.get("simd_count", "0") == "0" or (minor != "0" and not _is_usable(root / "dev/dri" / render)):
            continue
        unique_id = int(facts.get("unique_id", "0") or 0)
        uuid = f"GPU-{unique_id:016x}" if unique_id else ""
        gpus.append(Gpu(uuid, _number(root / "sys/class/drm" / render / "device/numa_node"), Vendor.AMD))
    return tuple(gpus)


def _numbered(folder: Path, name: str) -> list[tuple[int, Path]]:
    """The usable device nodes `name` with a number in `folder`, in the order of their numbers."""
    numbers = sorted(int(n) for path in folder.glob(f"{name}[0-9]*") if (n := path.name.removeprefix(name)).isdecimal())
    return [(number, path) for number in numbers if _is_usable(path := folder / f"{name}{number}")]


def _read_ascend(root: Path) -> tuple[Gpu, ...]:
    return tuple(Gpu(vendor=Vendor.ASCEND) for _ in _numbered(root / "dev", "davinci"))


def _read_gaudi(root: Path) -> tuple[Gpu, ...]:
    """Other accelerators have nodes with the same names."""
    folders = [root / "sys/class/accel" / path.name / "device" for _, path in _numbered(root / "dev/accel", "accel")]
    return tuple(
        Gpu("", _number(it / "numa_node"), Vendor.GAUDI) for it in folders if text_of(it / "vendor") == _HABANA
    )


def _read_intel(root: Path, *, integrated: bool = False) -> tuple[Gpu, ...]:
    """The tiles of Intel's cards, or the GPU in the processor, which is always at PCI address 0000:00:02.0.

    The driver xe lists a card's tiles. i915 lists a `gt` for each.
    """
    gpus: list[Gpu] = []
    for card, path in _numbered(root / "dev/dri", "renderD"):
        device = root / "sys/class/drm" / path.name / "device"
        if text_of(device / "vendor") != _INTEL or (device.resolve().name == _IN_PROCESSOR) != integrated:
            continue
        tiles = [*device.glob("tile[0-9]*")] or [*device.glob("drm/card*/gt/gt[0-9]*")]
        tile = Gpu("", _number(device / "numa_node"), Vendor.INTEL, card)
        gpus += [tile] * (1 if integrated else max(1, len(tiles)))
    return tuple(gpus)


# torch's names of the devices of these vendors.
KINDS: dict[str, Callable[[Path], tuple[Gpu, ...]]] = {"xpu": _read_intel, "npu": _read_ascend, "hpu": _read_gaudi}


@dataclass(frozen=True)
class Topology:
    """The host as this process may use it.

    `nodes` are the allowed CPUs of each NUMA node that has any. `homes` is the NUMA node of each visible GPU; without
    GPUs that of each worker. `packages`, `cores` and `caches` name each CPU's socket, physical core and largest shared
    cache, if it is known; CPUs with the same name share it.
    """

    nodes: Mapping[int, frozenset[int]]
    homes: tuple[int, ...]
    packages: Mapping[int, str] = field(default_factory=dict)
    cores: Mapping[int, str] = field(default_factory=dict)
    caches: Mapping[int, str] = field(default_factory=dict)

    @property
    def cpus(self) -> frozenset[int]:
        return frozenset().union(*self.nodes.values())


def cpu_set(binding: NumaBinding, index: int, topology: Topology) -> frozenset[int]:
    """The CPUs for the worker with local rank (and so GPU) `index`. Never empty.

    If there are more workers than GPUs, workers share the GPUs in turn, and the CPUs with them.
    """
    index %= len(topology.homes)
    node = topology.homes[index]
    cpus = topology.nodes.get(node, topology.cpus)
    # The worker's position among the workers of the same node.
    peers = [i for i, home in enumerate(topology.homes) if home == node]
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


def read_topology(slots: int, environ: Mapping[str, str], root: Path = Path("/")) -> Topology:
    """Read the host, with the CPUs of this process's affinity.

    `slots` workers share a host without GPUs, and are assigned to its nodes in turn; `environ` holds the variables that
    hide GPUs.
    """
    cpus = frozenset(os.sched_getaffinity(0))
    system = root / "sys/devices/system"
    nodes: dict[int, frozenset[int]] = {}
    for folder in (system / "node").glob("node[0-9]*"):
        ours = _ranges(text_of(folder / "cpulist")) & cpus
        if ours:
            nodes[int(folder.name.removeprefix("node"))] = ours
    # A kernel without NUMA has no such folder. All CPUs are one node then.
    nodes = nodes or {0: cpus}
    folders = {cpu: system / f"cpu/cpu{cpu}" for cpu in cpus}
    # That of an Ascend device is not known.
    gpus = (gpu for gpu in visible(read_gpus(root), environ) if gpu.vendor is not Vendor.ASCEND)
    gpu_nodes = [gpu.numa_node for gpu in gpus]
    turns = [sorted(nodes)[rank % len(nodes)] for rank in range(slots)]
    return Topology(
        nodes,
        # The kernel reports -1 on a host with one node.
        homes=tuple(node if node >= 0 else min(nodes) for node in gpu_nodes or turns),
        packages={cpu: text_of(path / "topology/physical_package_id") for cpu, path in folders.items()},
        cores={cpu: text_of(path / "topology/thread_siblings_list") for cpu, path in folders.items()},
        caches={cpu: _largest_cache(path / "cache") for cpu, path in folders.items()},
    )


def _ranges(text: str) -> frozenset[int]:
    """The CPUs in a list in the kernel's form, like `0-2,4`."""
    pairs = (part.partition("-") for part in text.split(",") if part.strip())
    return frozenset(
        cpu for first, _, last in pairs for cpu in range(int(first), min(int(last or first), _CPU_MAX) + 1)
    )


def _largest_cache(folder: Path) -> str:
    """The list of CPUs that share the highest level of cache, in the kernel's form. Instruction caches do not count."""
    found = [
        (int(text_of(index / "level") or 0), text_of(index / "shared_cpu_list"))
        for index in folder.glob("index*")
        if re.fullmatch("Unified|Data", text_of(index / "type"))
    ]
    return max(found)[1] if found else ""


def _number(path: Path) -> int:
    with suppress(ValueError):
        return int(text_of(path))
    return -1


def _facts(path: Path, separator: str) -> dict[str, str]:
    """Lines of `name<separator>value`; nothing if the file cannot be read."""
    pairs = (line.partition(separator) for line in text_of(path).splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
