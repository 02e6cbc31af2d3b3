"""The GPUs that this process may use, found without opening CUDA: device nodes and the variables that hide some."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Vendor(Enum):
    """The vendor. Each vendor has its own variables that hide GPUs."""

    NVIDIA = "nvidia"
    AMD = "amd"


@dataclass(frozen=True)
class Gpu:
    """One GPU. `uuid` is empty and `numa_node` is -1 if the driver does not tell them."""

    vendor: Vendor
    uuid: str = ""
    numa_node: int = -1


def visible(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that the runtime will number 0, 1, …: all of them, or those that the variables choose, in that order."""
    nvidia = [gpu for gpu in gpus if gpu.vendor is Vendor.NVIDIA]
    if nvidia:
        return _chosen(nvidia, environ.get("CUDA_VISIBLE_DEVICES"))
    # ROCm's runtime selects first, and HIP then selects from the rest. HIP reads CUDA's variable if its own is missing.
    amd = _chosen(gpus, environ.get("ROCR_VISIBLE_DEVICES"))
    return _chosen(amd, environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES")))


def _chosen(gpus: Sequence[Gpu], variable: str | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA would choose: the entries before the first invalid one, or none if an entry is there twice."""
    if variable is None:
        return tuple(gpus)
    found: list[int] = []
    for entry in variable.split(","):
        word = entry.strip()
        if word.startswith("MIG-"):
            # CUDA gives a process one MIG instance, however many are listed.
            return tuple(gpus[:1])
        index = _index(word, gpus)
        if index is None:
            break
        if index in found and (gpus[index].uuid or word.isdigit()):
            return ()
        found.append(index)
    return tuple(gpus[index] for index in found)


def _index(word: str, gpus: Sequence[Gpu]) -> int | None:
    if re.fullmatch(r"[0-9]+", word):
        return int(word) if int(word) < len(gpus) else None
    if not word.startswith("GPU-"):
        return None
    matches = [i for i, gpu in enumerate(gpus) if gpu.uuid.startswith(word)]
    if len(matches) == 1:
        return matches[0]
    # This driver does not tell UUIDs, so the entry cannot be checked.
    return 0 if gpus and not any(gpu.uuid for gpu in gpus) else None


def read_gpus(root: Path = Path("/")) -> tuple[Gpu, ...]:
    """The GPUs of this host (or container) in the order of their PCI addresses."""
    return _read_nvidia(root) or _read_amd(root)


def _is_usable(node: Path) -> bool:
    """Whether the device node may be opened. The kernel answers without opening it, device cgroups included."""
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
            gpus.append(Gpu(Vendor.NVIDIA, uuid if re.fullmatch(r"GPU-[0-9a-f-]+", uuid) else "", node))
    return (*gpus, *(Gpu(Vendor.NVIDIA) for _ in minors))


def _read_amd(root: Path) -> tuple[Gpu, ...]:
    gpus: list[Gpu] = []
    for folder in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*"), key=lambda path: path.name.zfill(8)):
        facts = _facts(folder / "properties", " ")
        minor = facts.get("drm_render_minor", "0")
        render = f"renderD{minor}"
        # CPUs are nodes too, but have no SIMD units. A GPU of another container has no render node here.
        if facts.get("simd_count", "0") == "0" or (minor != "0" and not _is_usable(root / "dev/dri" / render)):
            continue
        unique_id = int(facts.get("unique_id", "0") or 0)
        uuid = f"GPU-{unique_id:016x}" if unique_id else ""
        gpus.append(Gpu(Vendor.AMD, uuid, _number(root / "sys/class/drm" / render / "device/numa_node")))
    return tuple(gpus)


def _facts(path: Path, separator: str) -> dict[str, str]:
    """Lines of `name<separator>value`; nothing if the file cannot be read."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(separator) for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return -1
