"""What `--parallel auto` chooses under a limit of memory: `python -m bench.plan_choices [CASE …]`.

Each case is a whole run of the bundled trainer in a memory cgroup of its own, whose limit the kernel enforces: so it
needs root. A row has the estimates beside what the chosen plan and the other measured plans took, and how the run
ended. CASE is the number of a row.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.contenders import ELAUNCH, environment
from elaunch.trainer.parallel.estimate import Memory

STEPS = 5
_LIMIT_S = 600.0
_MB = 1_000_000
_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Case:
    """A network, the number of workers, and the memory of all of them with their agent."""

    model: str
    workers: int
    limit_mb: int


# Layers, width, heads, context, global batch, micro-batch.
MODELS = {
    "4 x 384": (4, 384, 8, 16, 8, 2),
    "8 x 256": (8, 256, 8, 16, 8, 1),
    "4 x 128, long": (4, 128, 4, 64, 32, 16),
    "4 x 512": (4, 512, 8, 8, 4, 1),
}
_OPTIONS = ("--layers", "--width", "--heads", "--context", "--global-batch", "--micro-batch")
CASES = [
    *(Case("4 x 384", 2, limit_mb) for limit_mb in (2500, 1550, 1450, 1000)),
    *(Case("8 x 256", 2, limit_mb) for limit_mb in (2500, 1480, 1420)),
    *(Case("4 x 128, long", 2, limit_mb) for limit_mb in (2500, 1280, 1220)),
    *(Case("4 x 512", 2, limit_mb) for limit_mb in (3000, 1950, 1800, 1200)),
    Case("4 x 384", 4, 2500),
    Case("4 x 512", 4, 2500),
]


class MemoryCgroup:
    """A cgroup with a limit of memory, of either version."""

    def __init__(self, limit_bytes: int) -> None:
        self._is_v1 = (_V1 / "memory.limit_in_bytes").exists()
        if not self._is_v1:
            (_V2 / "cgroup.subtree_control").write_text("+memory")
        self._folder = (_V1 if self._is_v1 else _V2) / f"elaunch-bench-{os.getpid()}"
        self._folder.mkdir()
        limit = "memory.limit_in_bytes" if self._is_v1 else "memory.max"
        (self._folder / limit).write_text(str(limit_bytes))
        if not self._is_v1:
            (self._folder / "memory.swap.max").write_text("0")

    def enter(self) -> None:
        """Put the calling process into it."""
        (self._folder / "cgroup.procs").write_text("0")

    def used(self) -> int:
        """The bytes that the kernel cannot drop."""
        lines = (line.split() for line in (self._folder / "memory.stat").read_text().splitlines())
        held = {words[0]: int(words[1]) for words in lines}
        names = ("total_rss", "total_shmem") if self._is_v1 else ("anon", "shmem")
        return sum(held.get(name, 0) for name in names)

    def kills(self) -> int:
        """How many processes the kernel has killed for lack of memory."""
        events = (self._folder / ("memory.oom_control" if self._is_v1 else "memory.events")).read_text()
        return next(int(line.split()[1]) for line in events.splitlines() if line.startswith("oom_kill "))

    def remove(self) -> None:
        """All processes in it have ended; the kernel may take a moment to see that."""
        until_s = time.monotonic() + 30
        while True:
            try:
                self._folder.rmdir()
                return
            except OSError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.1)


@contextlib.contextmanager
def limited(limit_bytes: int) -> Iterator[MemoryCgroup]:
    cgroup = MemoryCgroup(limit_bytes)
    try:
        yield cgroup
    finally:
        cgroup.remove()


def run(case: Case) -> dict[str, Any]:
    """How the case ended: the exit code, kills, the peak, the recorded choice and the seconds of its steps."""
    with tempfile.TemporaryDirectory() as name, limited(case.limit_mb * _MB) as cgroup:
        folder = Path(name)
        (folder / "text").mkdir()
        (folder / "text" / "words.txt").write_text("".join(chr(97 + i * i % 26) for i in range(60_000)))
        shape = zip(_OPTIONS, MODELS[case.model], strict=True)
        options = [word for option, value in shape for word in (option, str(value))]
        trained = ["-m", "elaunch.trainer", "--parallel", "auto", "--steps", str(STEPS), *options]
        places = ["--data", str(folder / "text"), "--out", str(folder / "run")]
        command = [sys.executable, "-m", "elaunch", "--max-restarts", "0", "--nproc-per-node", str(case.workers)]
        peak, has_ended = 0, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not has_ended.wait(0.02):
                peak = max(peak, cgroup.used())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            ended = subprocess.run(
                [*command, *trained, *places],
                env=environment(os.environ, ELAUNCH, {}),
                preexec_fn=cgroup.enter,
                capture_output=True,
                text=True,
                timeout=_LIMIT_S,
                check=False,
            )
        finally:
            has_ended.set()
            watcher.join()
        said = [line for line in (ended.stdout + ended.stderr).splitlines() if "parallel" in line]
        found: dict[str, Any] = {"code": ended.returncode, "kills": cgroup.kills(), "peak": peak, "said": said}
        if ended.returncode:
            found["said"] += ended.stderr.splitlines()[-3:]
        if (record := folder / "run" / "plan.json").exists():
            found |= json.loads(record.read_text())
            lines = (json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines())
            found["seconds"] = [line["seconds"] for line in lines][1:]
        return found


def row(case: Case, found: dict[str, Any]) -> tuple[str, list[tuple[float, float]]]:
    """A row of the table, and the errors of the estimates of memory and time of all measured plans."""
    head = f"| {case.model} | {case.workers} | {case.limit_mb:,}"
    if "plan" not in found:
        is_refused = not found["kills"] and any("no plan fits" in line for line in found["said"])
        why = "refused: nothing fits" if is_refused else f"exit code {found['code']}, {found['kills']} killed"
        return f"{head} | - | {why} | | | | |", []
    tried = [each for each in found["tried"] if each["measured"] is not None]
    tried.sort(key=lambda each: each["plan"] != found["plan"])
    cells, errors = [], []
    for each in tried:
        estimated = _step(each["memory"])
        error = estimated / each["measured"] - 1, each["step_s"] / each["measured_s"] - 1
        errors.append(error)
        memory = f"{estimated / _MB:.0f} / {each['measured'] / _MB:.0f} MB ({100 * error[0]:+.0f} %)"
        took = f"{1000 * each['step_s']:.0f} / {1000 * each['measured_s']:.0f} ms ({100 * error[1]:+.0f} %)"
        cells.append((each["plan"], memory, took))
    (_, memory, took), rejected = cells[0], cells[1:]
    others = "; ".join(f"`{plan}`: {memory}, {took}" for plan, memory, took in rejected)
    too_large = [each for each in found["tried"] if each["needs"] > found["room"]]
    ending = (
        "complete"
        if found["code"] == 0 and not found["kills"]
        else f"exit code {found['code']}, {found['kills']} killed"
    )
    return (
        f"{head} | `{found['plan']}` | {memory} | {took} | {others or '-'} | {len(too_large)} of {len(found['tried'])} "
        f"| {found['peak'] / _MB:,.0f} MB, {1000 * min(found['seconds']):.0f} ms, {ending} |"
    ), errors


def _step(memory: dict[str, int]) -> int:
    return Memory(**memory).step


def main() -> None:
    """Print the table."""
    chosen = [CASES[int(word) - 1] for word in sys.argv[1:]] or CASES
    errors: list[tuple[float, float]] = []
    print(
        "| network | workers | limit, MB | chosen | its memory: estimate / measured | its step: estimate / measured "
        "| two other measured plans | too large | the whole run: memory of all, step, end |\n" + "|---" * 9 + "|"
    )
    for case in chosen:
        found = run(case)
        line, of_case = row(case, found)
        errors += of_case
        print(line, flush=True)
        print(*found["said"], sep="\n", file=sys.stderr, flush=True)
    for name, values in (("memory", [each[0] for each in errors]), ("time", [each[1] for each in errors])):
        if values:
            span = f"{100 * min(values):+.0f} to {100 * max(values):+.0f} %"
            print(f"\n{name}: error of the estimate {span}, n = {len(values)}")
    print(f"\nload {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
