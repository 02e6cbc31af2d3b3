"""Checks of torch with its CUDA, and of GPUs by nvidia-smi."""

from __future__ import annotations

import csv
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from elaunch.agent.workers.topology import Vendor, read_gpus, visible
from elaunch.launcher.doctor.host import Finding, Needs, bad, ok, warn
from elaunch.launcher.inspect.text import duration
from elaunch.strict_json import parse_json

TORCH_S = 60.0
_SMI_S = 20.0
_SLOW_IMPORT_S = 15.0
_SHOWN_MAX = 4
_QUERY = (
    "index,uuid,name,driver_version,ecc.errors.uncorrected.volatile.total,remapped_rows.pending,remapped_rows.failure"
)
_RESET = "drain the node and reset the GPU (nvidia-smi --gpu-reset -i {}), or reboot"

# Run by the workers' interpreter. CUDA starts as in a worker: that finds a driver that is too old.
PROBE = """
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


def check_torch(environ: Mapping[str, str], needs: Needs) -> Iterator[Finding]:
    """Whether the workers' interpreter imports torch, with CUDA where there are GPUs."""
    if not needs.uses_python:
        yield ok("the program is a command: torch was not tried")
        return
    gpus = len(visible(read_gpus(), environ))
    argv = [needs.interpreter, "-c", PROBE, str(gpus)]
    try:
        yield from judge_torch(_run(argv, TORCH_S, environ), gpus)
        return
    except subprocess.CalledProcessError as error:
        why = (error.stderr.strip().splitlines() or [str(error)])[-1]
    except (OSError, ValueError, KeyError, TypeError, subprocess.TimeoutExpired) as error:
        why = str(error)
    yield bad(
        f"{needs.interpreter} cannot import torch: {why}",
        f"{needs.interpreter} -m pip install torch, or start elaunch from the environment that has it",
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


def judge_torch(output: str, gpus: int) -> Iterator[Finding]:
    """The findings about what `PROBE` has printed, on a node with that many GPUs for a process. Raises ValueError."""
    found = parse_json(output.rstrip().rpartition("\n")[2])
    version, cuda, seconds = str(found["version"]), str(found["cuda"]), float(found["seconds"])
    build = f"CUDA {cuda}" if cuda else "CPU build"
    nccl = f", NCCL {found['nccl']}" if found["nccl"] else ""
    text = f"torch {version} ({build}{nccl}), imported in {duration(seconds)}"
    if seconds > _SLOW_IMPORT_S:
        yield warn(f"{text}; each start of a job takes so long", "put the environment on a local disk")
    else:
        yield ok(text)
    if gpus and not cuda:
        way_out = "install the build for CUDA: https://pytorch.org/get-started/locally"
        yield bad(f"{gpus} GPU(s), and torch {version} is a build for CPUs", way_out)
    if error := found.get("cuda_error"):
        yield bad(f"CUDA does not start: {error}", "run nvidia-smi; the driver may be too old for this torch")


def check_gpus(environ: Mapping[str, str], needs: Needs) -> Iterator[Finding]:
    """The findings about GPUs."""
    devices = read_gpus()
    seen = len(visible(devices, environ))
    if devices and devices[0].vendor is not Vendor.NVIDIA:
        yield ok(f"{len(devices)} AMD GPU(s), {seen} visible; elaunch does not read their health")
    elif not devices and not Path("/proc/driver/nvidia/version").exists():
        way_out = "ask the scheduler for GPUs; in a container use the NVIDIA runtime (docker run --gpus all)"
        missing = bad("--nproc-per-node gpu needs an NVIDIA driver, and there is none here", way_out)
        yield missing if needs.wants_gpus else ok("no NVIDIA driver here")
    elif not shutil.which("nvidia-smi"):
        yield warn(
            f"{len(devices)} NVIDIA GPU(s), whose health cannot be read: nvidia-smi is not on the PATH",
            "in a container NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )
    else:
        try:
            rows = _smi(f"--query-gpu={_QUERY}")
            used = _smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
            yield from judge_gpus(rows, used, len(devices))
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            output = error.stdout.strip() if isinstance(error, subprocess.CalledProcessError) else ""
            why = (output or str(error)).splitlines()[0]
            yield bad(
                f"{len(devices)} NVIDIA GPU(s), but the driver does not answer: {why}",
                "reboot, or reload the driver; after an update of the driver both parts must be of one version",
            )
            return
        if needs.workers > seen > 0:
            way_out = "NCCL refuses two ranks on one GPU: use --nproc-per-node gpu"
            yield warn(f"{needs.workers} workers share {seen} GPU(s)", way_out)


def _smi(query: str) -> list[list[str]]:
    printed = _run(["nvidia-smi", query, "--format=csv,noheader,nounits"], _SMI_S)
    return [[word.strip() for word in row] for row in csv.reader(printed.splitlines()) if row]


def judge_gpus(rows: list[list[str]], used: list[list[str]], devices: int) -> Iterator[Finding]:
    """The findings about nvidia-smi's tables: of GPUs, and of processes. Raises ValueError.

    `devices` is the number of device files of GPUs.
    """
    models = dict.fromkeys(row[2] for row in rows)
    kinds = ", ".join(f"{sum(row[2] == model for row in rows)} × {model}" for model in models)
    yield ok(f"{kinds}, driver {rows[0][3]}" if rows else "nvidia-smi lists no GPU")
    if len(models) > 1:
        way_out = "all ranks wait for the slowest GPU; choose equal ones with CUDA_VISIBLE_DEVICES"
        yield warn(f"the GPUs differ: {kinds}", way_out)
    if len(rows) < devices:
        way_out = "a GPU may have fallen off the bus: look for Xid 79 in dmesg, and reboot"
        yield bad(f"{devices} GPUs have device files, and the driver sees {len(rows)}", way_out)
    for index, uuid, _, _, uncorrected, remapping, failed in rows:
        who, reset = f"GPU {index}", _RESET.format(index)
        if failed == "Yes":
            yield bad(f"{who} could not take a bad row of memory out of use", "have the vendor replace it (RMA)")
        if uncorrected.isdecimal() and int(uncorrected):
            yield bad(f"{who} had {uncorrected} uncorrectable memory errors since the driver was loaded", reset)
        if remapping == "Yes":
            yield bad(f"{who} waits for a reset to take bad memory out of use", reset)
        if processes := [row for row in used if row[0] == uuid and row[1].isdecimal()]:
            names = ", ".join(f"{row[2].rpartition('/')[2]} (pid {row[1]})" for row in processes[:_SHOWN_MAX])
            yield warn(f"{who} is in use by {names}", "end them, or choose other GPUs with CUDA_VISIBLE_DEVICES")
