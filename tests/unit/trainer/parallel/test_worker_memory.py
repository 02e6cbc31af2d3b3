"""What a worker may take and has taken, and the peak, which the kernel counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from elaunch.trainer.memory.room import cgroup_rooms, machine_room, tightest_room
from elaunch.trainer.parallel.worker_memory import worker_room

CPU = torch.device("cpu")
MB = 1_000_000
MEMINFO = "MemTotal:       1000000 kB\nMemFree:         100000 kB\nMemAvailable:    600000 kB\nHugePages_Total:  0\n"
# In a process of its own: this one has freed memory that glibc keeps.
PROGRAM = """
import json, torch
from elaunch.trainer.parallel.worker_memory import PeakMeter, keep_little_of_what_is_freed
keep_little_of_what_is_freed()
torch.ones(1000).sum()
meter = PeakMeter(torch.device("cpu"))
first = torch.ones(25_000_000)
meter.start()
left = meter.left
meter.begin()
second, third = torch.ones(10_000_000), torch.ones(5_000_000)
del second, third
peak = meter.peak()
meter.begin()
print(json.dumps({"left": left, "peak": peak, "later": meter.peak()}))
"""


@pytest.mark.parametrize("is_v1", [True, False])
def test_the_tightest_cgroup_is_shared_by_the_workers_of_the_node(tmp_path: Path, is_v1: bool) -> None:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_v1 else ("memory.max", "memory.current")
    for name, value in zip(names, (4000 * MB, 900 * MB), strict=True):
        (tmp_path / name).write_text(f"{value}\n")
    (tmp_path / "memory.stat").write_text(f"{'total_' * is_v1}active_file {100 * MB}\n")
    (room,) = cgroup_rooms("4:memory:/\n" if is_v1 else "0::/\n", tmp_path, tmp_path)

    found = worker_room(CPU, 4, room)

    # A twentieth stays free.
    assert found.most == 950 * MB
    # Page cache does not count. What this process may share with a fork server counts besides.
    assert found.taken >= 200 * MB
    assert found.where == f"the cgroup {tmp_path} ({names[0]} 4,000.0 MB), for 4 workers"


def test_without_a_cgroup_the_machine_limits_the_workers() -> None:
    room = machine_room(MEMINFO)

    assert room.used == 400_000 << 10
    assert room.most == int((1_000_000 << 10) * 0.95)
    assert room.free == room.most - room.used
    assert worker_room(CPU, 1, room).where == "the machine (1,024.0 MB)"
    assert tightest_room().free <= machine_room().most


def test_the_peak_is_what_was_there_at_once_since_the_beginning_and_above_the_start() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=570)

    found = json.loads(ended.stdout)
    assert 95 * MB < found["left"] < 120 * MB
    assert 55 * MB < found["peak"] < 80 * MB
    assert found["later"] < 20 * MB
