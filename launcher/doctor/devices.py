"""Checks of torch with its CUDA, of GPUs by nvidia-smi, and of InfiniBand or RoCE ports."""

from __future__ import annotations

import csv
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from elaunch.agent.workers.gpus import Vendor, read_gpus, visible
from elaunch.launcher.doctor.findings import Finding, Needs, bad, ok, span, warn
from elaunch.launcher.doctor.host import memlock_finding
from elaunch.strict_json import parse_json

TORCH_S = 60.0
_SMI_S = 20.0
_SLOW_IMPORT_S = 15.0
_SHOWN_MAX = 4
_QUERY = (
    *("index", "uuid", "name", "driver_version"),
    "ecc.errors.uncorrected.volatile.total",
)
# A driver before 2020 does not know these, and then it refuses a whole query that has them.
_FLAGS = ("remapped_rows.pending", "remapped_rows.failure")
_RESET = "drain the node and reset the GPU (nvidia-smi --gpu-reset -i {}), or reboot"

# Run by the workers' interpreter. CUDA starts as in a worker: that finds a driver that is too old.
LOOK = """
import json, sys, time
start = time.monotonic()
import torch
found = {"version": torch.__version__, "cuda": torch.version.cuda or "", "seconds": time.monotonic() - start}
try:
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
except Exception:
    found["nccl"] = ""
if torch.version.cuda and sys.argv[1] != "0":
    try:
        torch.cuda.init()
    except Exception as error:
        found["cuda_error"] = str(error).strip().partition("\\n")[0]
print("\\n" + json.dumps(found))
"""


def check_torch(environ: Mapping[str, str], needs: Needs) -> tuple[Finding, ...]:
    """Whether the workers' interpreter imports torch, with CUDA where there are GPUs."""
    if not needs.uses_python:
        return (ok("the program is a command: torch was not tried"),)
    gpus = len(visible(read_gpus(), environ))
    argv = [needs.interpreter, "-c", LOOK, str(gpus)]
    try:
        return judge_torch(_run(argv, TORCH_S, environ), gpus)
    except subprocess.CalledProcessError as error:
        why = (error.stderr.strip().splitlines() or [str(error)])[-1]
    except (OSError, ValueError, KeyError, TypeError, subprocess.TimeoutExpired) as error:
        why = str(error)
    return (
        bad(
            f"{needs.interpreter} cannot import torch: {why}",
            f"{needs.interpreter} -m pip install torch, or start elaunch from the environment that has it",
        ),
    )


def _run(argv: list[str], limit_s: float, environ: Mapping[str, str] | None = None) -> str:
    """What a command has printed. A driver may hang in the kernel, so this is called in a thread of its own."""
    return subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        env=environ,
        timeout=limit_s,
        check=True,
    ).stdout


def judge_torch(said: str, gpus: int) -> tuple[Finding, ...]:
    """The findings about what `LOOK` has printed, on a node with that many GPUs for a process. Raises ValueError."""
    found = parse_json(said.rstrip().rpartition("\n")[2])
    version, cuda, seconds = str(found["version"]), str(found["cuda"]), float(found["seconds"])
    build = f"CUDA {cuda}" if cuda else "CPU build"
    nccl = f", NCCL {found['nccl']}" if found["nccl"] else ""
    text = f"torch {version} ({build}{nccl}), imported in {span(seconds)}"
    findings = [ok(text)]
    if seconds > _SLOW_IMPORT_S:
        findings = [warn(f"{text}; each start of a job takes so long", "put the environment on a local disk")]
    if gpus and not cuda:
        findings.append(
            bad(
                f"{gpus} GPU(s), and torch {version} is a build for CPUs",
                "install the build for CUDA: https://pytorch.org/get-started/locally",
            )
        )
    if error := found.get("cuda_error"):
        way_out = "run nvidia-smi; the driver may be too old for this torch"
        findings.append(bad(f"CUDA does not start: {error}", way_out))
    return tuple(findings)


def check_gpus(environ: Mapping[str, str], needs: Needs, *, has_processes: bool = True) -> tuple[Finding, ...]:
    """The findings about GPUs. Without `has_processes` it is not queried which processes use them."""
    devices = read_gpus()
    seen = len(visible(devices, environ))
    if devices and devices[0].vendor is not Vendor.NVIDIA:
        return (ok(f"{len(devices)} AMD GPU(s), {seen} visible; elaunch does not read their health"),)
    if not devices and not Path("/proc/driver/nvidia/version").exists():
        if needs.wants_gpus:
            return (
                bad(
                    "--nproc-per-node gpu needs an NVIDIA driver, and there is none here",
                    "ask the scheduler for GPUs; in a container use the NVIDIA runtime (docker run --gpus all)",
                ),
            )
        return (ok("no NVIDIA driver here"),)
    if not shutil.which("nvidia-smi"):
        return (
            warn(
                f"{len(devices)} NVIDIA GPU(s), whose health cannot be read: nvidia-smi is not on the PATH",
                "in a container NVIDIA_DRIVER_CAPABILITIES=compute,utility",
            ),
        )
    try:
        rows = _query()
        used = _smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory") if has_processes else []
        found = judge_gpus(rows, used, len(devices))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        said = error.stdout.strip() if isinstance(error, subprocess.CalledProcessError) else ""
        return (
            bad(
                f"{len(devices)} NVIDIA GPU(s), but the driver does not answer: {(said or str(error)).splitlines()[0]}",
                "reboot, or reload the driver; after an update of the driver both parts must be of one version",
            ),
        )
    if needs.workers > seen > 0:
        way_out = "NCCL refuses two ranks on one GPU: use --nproc-per-node gpu"
        found = (*found, warn(f"{needs.workers} workers share {seen} GPU(s)", way_out))
    return found


def _query() -> list[list[str]]:
    """A row for each GPU: of `_QUERY` and `_FLAGS`. A flag that the driver does not know is empty."""
    with suppress(subprocess.CalledProcessError):
        return _smi(f"--query-gpu={','.join((*_QUERY, *_FLAGS))}")
    return [[*row, "", ""] for row in _smi(f"--query-gpu={','.join(_QUERY)}")]


def _smi(query: str) -> list[list[str]]:
    printed = _run(["nvidia-smi", query, "--format=csv,noheader,nounits"], _SMI_S)
    return [[word.strip() for word in row] for row in csv.reader(printed.splitlines()) if row]


def judge_gpus(rows: list[list[str]], used: list[list[str]], devices: int) -> tuple[Finding, ...]:
    """The findings about nvidia-smi's tables: of GPUs, and of processes. Raises ValueError.

    `devices` is the number of device files of GPUs.
    """
    models = dict.fromkeys(row[2] for row in rows)
    kinds = ", ".join(f"{sum(row[2] == model for row in rows)} × {model}" for model in models)
    found = [ok(f"{kinds}, driver {rows[0][3]}" if rows else "nvidia-smi lists no GPU")]
    if len(models) > 1:
        way_out = "all ranks wait for the slowest GPU; choose equal ones with CUDA_VISIBLE_DEVICES"
        found.append(warn(f"the GPUs differ: {kinds}", way_out))
    if len(rows) < devices:
        found.append(
            bad(
                f"{devices} GPUs have device files, and the driver sees {len(rows)}",
                "a GPU may have fallen off the bus: look for Xid 79 in dmesg, and reboot",
            )
        )
    for index, uuid, _, _, uncorrected, remapping, failed in rows:
        who, reset = f"GPU {index}", _RESET.format(index)
        if failed == "Yes":
            found.append(
                bad(f"{who} could not take a bad row of memory out of use", "have the vendor replace it (RMA)")
            )
        if uncorrected.isdecimal() and int(uncorrected):
            found.append(bad(f"{who} had {uncorrected} uncorrectable memory errors since the driver was loaded", reset))
        if remapping == "Yes":
            found.append(bad(f"{who} waits for a reset to take bad memory out of use", reset))
        if processes := [row for row in used if row[0] == uuid and row[1].isdecimal()]:
            names = ", ".join(f"{row[2].rpartition('/')[2]} (pid {row[1]})" for row in processes[:_SHOWN_MAX])
            found.append(
                warn(f"{who} is in use by {names}", "end them, or choose other GPUs with CUDA_VISIBLE_DEVICES")
            )
    return tuple(found)


def check_rdma(root: Path = Path("/sys/class/infiniband")) -> tuple[Finding, ...]:
    """Whether NCCL finds its fast interface."""
    # "4: ACTIVE"
    states = [path.read_text().partition(":")[2].strip() for path in sorted(root.glob("*/ports/*/state"))]
    if not states:
        return (ok("no InfiniBand or RoCE device here: NCCL uses TCP"),)
    active = states.count("ACTIVE")
    text = f"{active} of {len(states)} InfiniBand or RoCE ports are active"
    if not active:
        return (warn(f"{text}, so NCCL uses TCP", "check cables, switch and subnet manager (ibstat)"),)
    trouble = memlock_finding()
    return (ok(text), *([trouble] if trouble else []))
