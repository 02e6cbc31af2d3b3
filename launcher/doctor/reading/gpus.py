"""Reads GPUs by NVML where `nvidia-ml-py` is installed, else by nvidia-smi; the kernel log's Xids; RDMA ports."""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from elaunch.agent.workers.gpus import Gpu, Vendor, read_gpus, visible
from elaunch.launcher.doctor.facts import (
    GpuFacts,
    GpuProcess,
    GpuState,
    KernelLogFacts,
    RdmaFacts,
    XidEvent,
)
from elaunch.launcher.doctor.reading.host import read_memlock

_SMI_S = 20.0
_MIB = 1 << 20
# nvmlClocksEventReasons
_SLOWED_BY = {0x08: "hardware slowdown", 0x40: "heat", 0x80: "the power supply's brake"}
_QUERY = (
    *("index", "uuid", "name", "driver_version", "temperature.gpu", "memory.used", "memory.total"),
    *("ecc.errors.uncorrected.volatile.total", "retired_pages.pending"),
)
# A kernel record: "priority,sequence,microseconds since boot,flags;text"
_XID = re.compile(rb"^\d+,\d+,(\d+),[^;]*;.*NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]+)[^)]*\): (\d+)")
_RECORDS_MAX = 100_000


def usable_gpus(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that a process here may use, found without their driver."""
    return visible(read_gpus(), environ)


def read_gpu_facts(environ: Mapping[str, str], *, has_processes: bool = True) -> GpuFacts:
    """The GPUs of this node. Without `has_processes` nobody asks which processes use them."""
    devices = read_gpus()
    seen = len(visible(devices, environ))
    vendor = devices[0].vendor.value if devices else ""
    if (vendor and vendor != Vendor.NVIDIA.value) or not (devices or Path("/proc/driver/nvidia/version").exists()):
        return GpuFacts(nodes=len(devices), visible=seen, vendor=vendor)
    source, driver, gpus, trouble = _by_nvml(has_processes)
    if not source:
        source, driver, gpus, why = _by_smi(has_processes)
        trouble = why if source else f"{trouble}, and {why}"
    return GpuFacts(source, driver, trouble, len(devices), seen, Vendor.NVIDIA.value, gpus)


_Told = tuple[str, str, tuple[GpuState, ...], str]


def _by_nvml(has_processes: bool) -> _Told:
    """What NVML says. Without the package or the driver's library the source is empty."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return "", "", (), "nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:
        # Containers may have CUDA without it (NVIDIA_DRIVER_CAPABILITIES=compute).
        return "", "", (), "the driver's library for NVML is not here"
    except nvml.NVMLError as error:
        return "nvml", "", (), str(error)
    try:
        count = nvml.nvmlDeviceGetCount()
        gpus = tuple(_nvml_gpu(nvml, index, has_processes) for index in range(count))
        return "nvml", _word(nvml.nvmlSystemGetDriverVersion()), gpus, ""
    except nvml.NVMLError as error:
        return "nvml", "", (), str(error)
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _nvml_gpu(nvml: Any, index: int, has_processes: bool) -> GpuState:
    gpu = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(function: str, *args: Any) -> Any:
        """None where this GPU, or this version of NVML, does not know."""
        try:
            return getattr(nvml, function)(gpu, *args)
        except (nvml.NVMLError, AttributeError):
            return None

    remapped = ask("nvmlDeviceGetRemappedRows")
    pending = remapped[2] if remapped else ask("nvmlDeviceGetRetiredPagesPendingStatus")
    memory = ask("nvmlDeviceGetMemoryInfo")
    slowed = ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    running = (ask("nvmlDeviceGetComputeRunningProcesses") or []) if has_processes else []
    return GpuState(
        index,
        _word(nvml.nvmlDeviceGetName(gpu)),
        temperature_c=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        slows_at_c=ask("nvmlDeviceGetTemperatureThreshold", nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        slowed_by=", ".join(word for bit, word in _SLOWED_BY.items() if slowed & bit),
        uncorrected=ask("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC),
        pending=None if pending is None else bool(pending),
        remap_failed=bool(remapped[3]) if remapped else None,
        memory_used=memory.used if memory else None,
        memory_total=memory.total if memory else None,
        processes=tuple(GpuProcess(each.pid, _process_name(each.pid), each.usedGpuMemory) for each in running),
    )


def _word(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        # In another pid namespace.
        return ""


def _by_smi(has_processes: bool) -> _Told:
    import shutil
    import subprocess

    if not shutil.which("nvidia-smi"):
        return "", "", (), "neither is nvidia-smi"
    try:
        rows = _smi(f"--query-gpu={','.join(_QUERY)}")
        used = _smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory") if has_processes else []
        # An older driver does not know these, and refuses a whole query that has them.
        remapped: list[list[str]] = []
        with suppress(OSError, ValueError, subprocess.SubprocessError):
            remapped = _smi("--query-gpu=uuid,remapped_rows.pending,remapped_rows.failure")
        return "nvidia-smi", rows[0][3] if rows else "", smi_gpus(rows, used, remapped), ""
    except subprocess.CalledProcessError as error:
        said = (error.stdout or error.stderr or "").strip().splitlines()
        return "nvidia-smi", "", (), said[0] if said else f"nvidia-smi exits with code {error.returncode}"
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
        return "nvidia-smi", "", (), f"nvidia-smi: {error}"


def _smi(query: str) -> list[list[str]]:
    import csv
    import subprocess

    ended = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_SMI_S,
        check=True,
    )
    return [[word.strip() for word in row] for row in csv.reader(ended.stdout.splitlines()) if row]


def smi_gpus(rows: list[list[str]], used: list[list[str]], remapped: list[list[str]]) -> tuple[GpuState, ...]:
    """The GPUs in nvidia-smi's tables: of `_QUERY`, of its processes, and of remapped rows."""
    rows_of = {row[0]: row[1:] for row in remapped if len(row) == 3}
    gpus = []
    for index, uuid, name, _, temperature, memory_used, memory_total, uncorrected, retired in rows:
        waits, failed = rows_of.get(uuid, ["", ""])
        processes = tuple(
            GpuProcess(int(row[1]), row[2].rpartition("/")[2], _scaled(row[3]))
            for row in used
            if row[0] == uuid and row[1].isdecimal()
        )
        gpus.append(
            GpuState(
                int(index),
                name,
                temperature_c=_number(temperature),
                uncorrected=_number(uncorrected),
                pending=_flag(waits) if _flag(waits) is not None else _flag(retired),
                remap_failed=_flag(failed),
                memory_used=_scaled(memory_used),
                memory_total=_scaled(memory_total),
                processes=processes,
            )
        )
    return tuple(gpus)


def _number(word: str) -> int | None:
    """A number; None for `[N/A]` and `[Not Supported]`."""
    return int(word) if word.isdecimal() else None


def _scaled(word: str) -> int | None:
    return int(word) * _MIB if word.isdecimal() else None


def _flag(word: str) -> bool | None:
    return {"yes": True, "1": True, "no": False, "0": False}.get(word.lower())


def read_kernel_log(path: str = "/dev/kmsg") -> KernelLogFacts:
    """The Xids since boot, as far as the kernel still has them."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return KernelLogFacts(False)
    try:
        records = _records(lambda: os.read(fd, 8192))
        now_s = time.clock_gettime(time.CLOCK_MONOTONIC)
        return KernelLogFacts(True, xids(records, now_s))
    except PermissionError:
        return KernelLogFacts(False)
    finally:
        os.close(fd)


def _records(read: Callable[[], bytes]) -> list[bytes]:
    records: list[bytes] = []
    while len(records) < _RECORDS_MAX:
        try:
            record = read()
        except BrokenPipeError:
            # Overwritten before it was read.
            continue
        except BlockingIOError:
            break
        if not record:
            break
        records.append(record)
    return records


def xids(records: list[bytes], now_s: float) -> tuple[XidEvent, ...]:
    """The Xids in records of /dev/kmsg, `now_s` seconds after boot."""
    found = (_XID.match(record) for record in records)
    return tuple(
        XidEvent(max(now_s - int(match[1]) / 1e6, 0.0), match[2].decode(), int(match[3])) for match in found if match
    )


def read_rdma(root: Path = Path("/sys/class/infiniband")) -> RdmaFacts:
    ports = []
    for state in sorted(root.glob("*/ports/*/state")):
        with suppress(OSError):
            # "4: ACTIVE"
            word = state.read_text().partition(":")[2].strip()
            ports.append((f"{state.parts[-4]}:{state.parts[-2]}", word))
    memlock, may_lock = read_memlock()
    return RdmaFacts(tuple(ports), memlock, may_lock)
