"""Tries programs: torch in the workers' interpreter, and py-spy on a process of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from elaunch.agent.linux import allow_tracer, die_with_parent, ptrace_scope
from elaunch.launcher.doctor.facts import StackFacts, TorchFacts
from elaunch.strict_json import parse_json

_LINE_MAX = 300
# Run by the workers' interpreter. CUDA starts as in a worker: that finds a driver that is too old.
_LOOK = """
import json, sys, time
start = time.monotonic()
import torch
found = {"version": torch.__version__, "cuda": torch.version.cuda or "", "seconds": time.monotonic() - start}
try:
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
except Exception:
    found["nccl"] = ""
if torch.version.cuda and sys.argv[1] == "1":
    try:
        torch.cuda.init()
        count = found["devices"] = torch.cuda.device_count()
        pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
        found["pairs"] = len(pairs)
        found["peerless"] = sum(not torch.cuda.can_device_access_peer(i, j) for i, j in pairs)
    except Exception as error:
        found["cuda_error"] = str(error).strip().partition("\\n")[0]
print("\\n" + json.dumps(found))
"""


def read_torch(interpreter: str, *, uses_python: bool, has_gpus: bool, limit_s: float) -> TorchFacts:
    """torch as a worker would import it. With `has_gpus` CUDA is started, too."""
    if not uses_python:
        return TorchFacts(interpreter)
    try:
        ended = _ran([interpreter, "-c", _LOOK, "1" if has_gpus else "0"], limit_s)
    except subprocess.TimeoutExpired:
        return TorchFacts(interpreter, error=f"not done within {limit_s:g} s")
    except OSError as error:
        return TorchFacts(interpreter, error=error.strerror or str(error))
    if ended.returncode:
        said = ended.stderr.strip().splitlines() or [_ended(ended.returncode)]
        return TorchFacts(interpreter, error=said[-1][:_LINE_MAX])
    try:
        found = parse_json(ended.stdout.rstrip().rpartition("\n")[2])
        return TorchFacts(
            interpreter,
            version=str(found["version"]),
            cuda=str(found["cuda"]),
            nccl=str(found["nccl"]),
            seconds=float(found["seconds"]),
            devices=int(found.get("devices", 0)),
            cuda_error=str(found.get("cuda_error", ""))[:_LINE_MAX],
            pairs=int(found.get("pairs", 0)),
            peerless=int(found.get("peerless", 0)),
        )
    except (ValueError, KeyError, TypeError) as error:
        return TorchFacts(interpreter, error=f"its answer cannot be read ({error})"[:_LINE_MAX])


def _ran(argv: list[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run a program that does not outlive this process. Raises OSError and SubprocessError."""
    parent = os.getpid()
    return subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=limit_s,
        preexec_fn=lambda: die_with_parent(parent, signal.SIGKILL),
    )


def _ended(code: int) -> str:
    return f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def read_stacks(limit_s: float) -> StackFacts:
    """Whether py-spy reads the stack of a process that is its sibling, and that allows it as workers do."""
    tool = shutil.which("py-spy") or _beside_python()
    if not tool:
        return StackFacts()
    scope = ptrace_scope()
    asks = os.getpid()
    pid = os.fork()
    if not pid:
        allow_tracer(asks)
        _elaunch_doctor_waits(limit_s)
        os._exit(0)
    start_s = time.monotonic()
    try:
        ended = _ran([tool, "dump", "--pid", str(pid)], limit_s)
    except (OSError, subprocess.SubprocessError) as error:
        return StackFacts(tool, str(error)[:_LINE_MAX], scope)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if _elaunch_doctor_waits.__name__ in ended.stdout:
        return StackFacts(tool, "", scope, time.monotonic() - start_s)
    said = (ended.stderr or ended.stdout).strip().splitlines() or [_ended(ended.returncode)]
    return StackFacts(tool, said[0][:_LINE_MAX], scope)


def _elaunch_doctor_waits(limit_s: float) -> None:
    time.sleep(2 * limit_s)


def _beside_python() -> str:
    """The tool of this interpreter's environment, which need not be on the PATH."""
    return shutil.which("py-spy", path=str(Path(sys.executable).parent)) or ""
