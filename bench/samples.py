"""The samples: one record per measurement, kept as JSON; their summary; and the machine that they were taken on."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from elaunch import __version__


@dataclass(frozen=True)
class Sample:
    """One measurement of one contender.

    Keys of `values` name what was measured; the section decides the unit. `stages` are times (s) since the start or
    the kill. If there is no value, `why` is the reason.
    """

    section: str
    contender: str
    workers: int
    values: Mapping[str, float] = field(default_factory=dict)
    stages: Mapping[str, float] = field(default_factory=dict)
    why: str = ""


@dataclass(frozen=True)
class Run:
    """One run: the machine and the settings as text, and all samples in the order of measurement."""

    machine: Mapping[str, str]
    settings: Mapping[str, str]
    samples: tuple[Sample, ...]

    def of(self, section: str, contender: str, workers: int) -> list[Sample]:
        """All samples of one contender in one section at one number of workers."""
        wanted = (section, contender, workers)
        return [s for s in self.samples if (s.section, s.contender, s.workers) == wanted]

    def contenders(self, section: str) -> list[str]:
        """The contenders of a section, in the order of appearance."""
        return list(dict.fromkeys(s.contender for s in self.samples if s.section == section))

    def workers(self, section: str) -> list[int]:
        """The numbers of workers in a section, ascending."""
        return sorted({s.workers for s in self.samples if s.section == section})


def encode(run: Run) -> str:
    """The run as JSON."""
    return json.dumps(asdict(run), indent=1)


def decode(text: str) -> Run:
    """The run that `encode` wrote. Raises ValueError, KeyError or TypeError for any other text."""
    fields: dict[str, Any] = json.loads(text)
    return Run(fields["machine"], fields["settings"], tuple(Sample(**sample) for sample in fields["samples"]))


def write(path: Path, run: Run) -> None:
    """Replace the file atomically, so that a stopped run leaves a complete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".tmp")
    fresh.write_text(encode(run))
    fresh.replace(path)


def failures(samples: Iterable[Sample]) -> list[str]:
    """Each different reason why samples failed, with its count: "3 × died"."""
    reasons = [s.why for s in samples if s.why]
    return [f"{reasons.count(reason)} × {reason}" for reason in dict.fromkeys(reasons)]


@dataclass(frozen=True)
class Summary:
    """Of `n` samples, in their unit."""

    n: int
    median: float
    p95: float
    most: float


def summarize(values: Sequence[float]) -> Summary | None:
    """The summary, or None if there is no value."""
    if not values:
        return None
    # Python 3.10 to 3.12 need two values.
    p95 = statistics.quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]
    return Summary(len(values), statistics.median(values), p95, max(values))


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

        def git(*args: str) -> str:
            return subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

        changed = (
            " with changes"
            if git("status", "--porcelain", "--untracked-files=no", "--", ":!docs", ":!bench/results")
            else ""
        )
        return f" ({git('rev-parse', '--short', 'HEAD')}{changed})"
    return ""
