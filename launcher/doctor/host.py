"""Findings (a grade, a sentence, the way out), the checks of this host, and `--health-check`, which runs some."""

from __future__ import annotations

import csv
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

from elaunch.agent.serve.event_hook import run_limited
from elaunch.agent.workers.topology import Vendor, read_gpus, visible
from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.inspect.text import duration
from elaunch.rendezvous.format import bytes_text, plain
from elaunch.strict_json import parse_json

_MIB = 1 << 20
# A worker's share of /dev/shm: NCCL's segments take up to 10 MB for each channel and peer, and a data loader's
# processes pass two batches each through it. Docker's default is 64 MiB for the whole container.
_SHM_MIN, _SHM_WANTED, _SHM_NODE_WANTED = 32 * _MIB, 256 * _MIB, 1024 * _MIB
# A limit, what each worker and the agent need at least, and what they may need.
# The agent's open files: pipes, a link and log files for each worker; and those of a data loader's tensors.
FILES = ("open files (ulimit -n)", (6, 64), (128, 512))
# Threads of one worker: OpenMP, NCCL, gloo, autograd, data loaders.
THREADS = ("this user's threads (ulimit -u)", (32, 64), (256, 64))
_GROW_SHM = "mount -o remount,size=16G /dev/shm; docker run --shm-size 16g; in a pod an emptyDir with medium Memory"
TORCH_S = 60.0
# A healthy node responds immediately, or after a few seconds without GPU persistence mode.
_HEALTH_S = 20.0
_SMI_S = 20.0
SITE_S, _PATIENT_S = 60.0, 3.0
_REASON_BYTES_MAX = 1 << 10
_SLOW_IMPORT_S = 15.0
_SHOWN_MAX = 4
_QUERY = (
    "index,uuid,name,driver_version,ecc.errors.uncorrected.volatile.total,remapped_rows.pending,remapped_rows.failure"
)
_RESET = "drain the node and reset the GPU (nvidia-smi --gpu-reset -i {}), or reboot"

# Run by the workers' interpreter. CUDA is initialized as in a worker, which fails if the driver is too old.
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


class Grade(str, Enum):
    """The result of a check. Only `BAD` means that training fails, or cannot start."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor. `advice` is the way out; it is empty for a check that is ok."""

    grade: Grade
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Needs:
    """What the job with these options needs of this node.

    `workers` is their number here. `ports` are those that MASTER_PORT may be; empty for any. `uses_python` is false for
    a program that is a command. `needs_gpus`: the user requested one worker per GPU.
    """

    workers: int = 1
    nodes_max: int = 1
    ports: tuple[int, ...] = ()
    interpreter: str = ""
    uses_python: bool = True
    needs_gpus: bool = False

    def need(self, what: str) -> str:
        return f"{self.workers} worker{' needs' if self.workers == 1 else 's need'} {what}"


ok, warn, bad = (partial(Finding, grade) for grade in Grade)


def worst(findings: Iterable[Finding]) -> Grade:
    """The worst of their grades; OK if there are none."""
    return max((each.grade for each in findings), key=[*Grade].index, default=Grade.OK)


def check_shm(needs: Needs, path: str = "/dev/shm") -> Iterator[Finding]:
    """Whether NCCL and data loaders have enough shared memory; too little ends the job with SIGBUS."""
    if not os.access(path, os.W_OK | os.X_OK):
        yield bad(f"{path} cannot be used by user {os.geteuid()}", _GROW_SHM)
        return
    known = os.statvfs(path)
    free, total = known.f_bavail * known.f_frsize, known.f_blocks * known.f_frsize
    text = f"{bytes_text(free)} of {bytes_text(total)} are free in {path}"
    least, wanted = _SHM_MIN * needs.workers, max(_SHM_WANTED * needs.workers, _SHM_NODE_WANTED)
    if free < least:
        yield bad(f"{text}; {needs.need(bytes_text(least))}, or a bus error (SIGBUS) ends the job", _GROW_SHM)
    elif free < wanted:
        yield warn(f"{text}; data loaders and NCCL may need {bytes_text(wanted)}", _GROW_SHM)
    else:
        yield ok(text)


def check_limits(needs: Needs) -> Iterator[Finding]:
    """Whether the limits of open files and of threads are enough."""
    yield judge_limit(FILES, _soft(resource.RLIMIT_NOFILE), needs)
    yield judge_limit(THREADS, sys.maxsize if os.geteuid() == 0 else _soft(resource.RLIMIT_NPROC), needs)


def check_open_files(workers: int) -> None:
    """Raises UsageError if the limit of open files is too low for that many workers."""
    finding = judge_limit(FILES, _soft(resource.RLIMIT_NOFILE), Needs(workers=workers))
    if finding.grade is Grade.BAD:
        raise UsageError(f"{finding.found}; {finding.advice}")


def judge_limit(rule: tuple[str, tuple[int, int], tuple[int, int]], limit: int, needs: Needs) -> Finding:
    """The finding about a limit; `limit` is `sys.maxsize` if there is none."""
    what, *numbers = rule
    least, wanted = (each * needs.workers + own for each, own in numbers)
    text = f"the limit of {what} is {'none' if limit == sys.maxsize else limit}"
    if limit < least:
        return bad(f"{text}, and {needs.need(str(least))}", f"raise it to {wanted}")
    if limit < wanted:
        return warn(f"{text}: with data loaders {needs.need(str(wanted))}", f"raise it to {wanted}")
    return ok(text)


def _soft(kind: int) -> int:
    limit = resource.getrlimit(kind)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def check_torch(environ: Mapping[str, str], needs: Needs) -> Iterator[Finding]:
    """Whether the workers' interpreter imports torch, with CUDA where there are GPUs."""
    if not needs.uses_python:
        yield ok("the program is a command: torch was not tried")
        return
    gpus = sum(gpu.vendor is Vendor.NVIDIA for gpu in visible(read_gpus(), environ))
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
    """The stdout of a command. A driver may hang in the kernel, so call this in a thread of its own."""
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
    """The findings about the output of `PROBE`, on a node with `gpus` visible GPUs. Raises ValueError."""
    found = parse_json(output.rstrip().rpartition("\n")[2])
    version, cuda, seconds = str(found["version"]), str(found["cuda"]), float(found["seconds"])
    build = f"CUDA {cuda}" if cuda else "CPU build"
    nccl = f", NCCL {found['nccl']}" if found["nccl"] else ""
    text = f"torch {version} ({build}{nccl}), imported in {duration(seconds)}"
    if seconds > _SLOW_IMPORT_S:
        yield warn(f"{text}; each start of a job takes that long", "put the environment on a local disk")
    else:
        yield ok(text)
    if gpus and not cuda:
        way_out = "install the build for CUDA: https://pytorch.org/get-started/locally"
        yield bad(f"{gpus} GPU(s), and torch {version} is a build for CPUs", way_out)
    if error := found.get("cuda_error"):
        yield bad(f"CUDA initialization failed: {error}", "run nvidia-smi; the driver may be too old for this torch")


def check_gpus(environ: Mapping[str, str], needs: Needs) -> Iterator[Finding]:
    devices = read_gpus()
    seen = len(visible(devices, environ))
    if devices and devices[0].vendor is not Vendor.NVIDIA:
        kind = devices[0].vendor.value
        yield ok(f"{len(devices)} {kind} GPU(s), {seen} visible; elaunch does not read their health")
    elif not devices and not Path("/proc/driver/nvidia/version").exists():
        way_out = "ask the scheduler for GPUs; in a container use the NVIDIA runtime (docker run --gpus all)"
        missing = bad("--nproc-per-node gpu needs an NVIDIA driver, and there is none here", way_out)
        yield missing if needs.needs_gpus else ok("no NVIDIA driver here")
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
                "reboot, or reload the driver: its kernel module and libraries must have the same version",
            )
            return
        if needs.workers > seen > 0:
            way_out = "NCCL refuses two ranks on one GPU: use --nproc-per-node gpu"
            yield warn(f"{needs.workers} workers share {seen} GPU(s)", way_out)


def _smi(query: str) -> list[list[str]]:
    printed = _run(["nvidia-smi", query, "--format=csv,noheader,nounits"], _SMI_S)
    return [[cell.strip() for cell in row] for row in csv.reader(printed.splitlines()) if row]


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
            yield bad(f"{who} failed to remap a bad row of memory", "have the vendor replace it (RMA)")
        if uncorrected.isdecimal() and int(uncorrected):
            yield bad(f"{who} had {uncorrected} uncorrectable memory errors since the driver was loaded", reset)
        if remapping == "Yes":
            yield bad(f"{who} needs a reset to remap bad memory", reset)
        if processes := [row for row in used if row[0] == uuid and row[1].isdecimal()]:
            names = ", ".join(f"{row[2].rpartition('/')[2]} (pid {row[1]})" for row in processes[:_SHOWN_MAX])
            yield warn(f"{who} is in use by {names}", "end them, or choose other GPUs with CUDA_VISIBLE_DEVICES")


def site_check(command: tuple[str, ...], environ: Mapping[str, str], log: Callable[[str], None]) -> None:
    """Run the site's own check of this node (`--health-command`). Raises SiteError if it fails."""
    output = os.memfd_create("health", os.MFD_CLOEXEC)
    waits = threading.Timer(_PATIENT_S, log, (f"waiting for --health-command {command[0]}, {SITE_S:g} s at most",))
    try:
        waits.start()
        trouble = run_limited(command, environ, subprocess.DEVNULL, output, SITE_S)
        reason = os.pread(output, _REASON_BYTES_MAX, 0).decode(errors="replace").strip().partition("\n")[0]
    except OSError as error:
        trouble, reason = f"cannot be started ({error.strerror})", ""
    finally:
        waits.cancel()
        os.close(output)
    if trouble:
        text = ": ".join(filter(None, (f"--health-command {command[0]} {trouble}", plain(reason))))
        raise SiteError(f"{os.uname().nodename} does not join the job: {text}")


@contextmanager
def health_check(
    workers: int, environ: Mapping[str, str], log: Callable[[str], None], *, is_strict: bool
) -> Iterator[None]:
    """Run the checks in a thread: a driver may hang. Faults are logged after the checks, until the context ends.

    A strict check is waited for, and raises SiteError for an unhealthy node, which keeps it out of the job.
    """
    needs, findings, is_over = Needs(workers=workers), list[Finding](), threading.Event()
    # Under --hosts and srun the lines of all nodes come to one place.
    this_node = os.uname().nodename

    def complaints() -> list[str]:
        return [f"{each.found} ({each.advice})" for each in findings if each.grade is Grade.BAD]

    def check() -> None:
        # A check that raises does not make the node unhealthy.
        with suppress(Exception):
            findings.extend([*check_shm(needs), *check_limits(needs)])
            findings.extend(check_gpus(environ, needs))
        for complaint in () if is_strict or is_over.is_set() else complaints():
            log(f"{this_node} is not healthy: {complaint} (--health-check strict would keep it out of the job)")

    thread = threading.Thread(target=check, name="elaunch-health", daemon=True)
    thread.start()
    if is_strict:
        thread.join(_HEALTH_S)
        if complained := ["its GPUs do not answer"] if thread.is_alive() else complaints():
            raise SiteError(
                f"{this_node} does not join the job, since it is not healthy: {'; '.join(complained)}."
                " elaunch doctor shows more; --health-check warn joins anyway"
            )
    try:
        yield
    finally:
        is_over.set()
