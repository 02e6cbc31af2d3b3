"""A description of the machine, for people who read the figures elsewhere."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from elaunch import __version__


def describe() -> dict[str, str]:
    """Name and value of each fact that the figures depend on, as it is now."""
    model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    cpus = len(os.sched_getaffinity(0))
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "elaunch": f"{__version__}{_commit()}",
        "torch": version("torch"),
        "Python": platform.python_version(),
        "CPUs": f"{cpus} × {model[1] if model else platform.machine()}",
        "memory": f"{int(memory[1]) / 2**20:.0f} GiB" if memory else "unknown",
        "kernel": f"{platform.system()} {platform.release()}",
        **_gpus(),
        "load before the run": f"{os.getloadavg()[0]:.2f}",
    }


def _gpus() -> dict[str, str]:
    """NVIDIA's driver lists them in /proc: CUDA is not started for a description."""
    texts = [path.read_text() for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    models = [match[1] for text in texts if (match := re.search(r"^Model:\s*(.+)$", text, re.MULTILINE))]
    return {"GPUs": f"{len(models)} × {models[0]}"} if models else {}


def _commit() -> str:
    root = Path(__file__).parent.parent
    with suppress(OSError, subprocess.SubprocessError):

        def git(*words: str) -> str:
            return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

        changed = " with changes" if git("status", "--porcelain", "--untracked-files=no", "--", ":!docs") else ""
        return f" ({git('rev-parse', '--short', 'HEAD')}{changed})"
    return ""
