"""The last messages between the ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import RUN_LIMIT_S, environment, script

# With this switch interval, a thread gets the interpreter only when the main thread waits for something. On a busy
# machine that happens once in thousands of runs. Gloo's threads may still hold a program's last operations when Python
# ends, and then abort it (pytorch #190489): one in ten of these processes, if `largest` were gloo's.
PAIRS = """
import os, socket, sys
import torch.distributed as dist
from elaunch.trainer.ranks.peers import Peers

def train(rank):
    dist.init_process_group("gloo", rank=rank, world_size=2)
    sys.setswitchinterval(1000)
    peers = Peers()
    for number in range(6):
        assert peers.largest([number, rank]) == [number, 1]
    peers.close()

codes = []
for _ in range(8):
    with socket.create_server(("127.0.0.1", 0)) as server:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(server.getsockname()[1]))
    pids = []
    for rank in range(2):
        pids.append(os.fork())
        if not pids[-1]:
            train(rank)
            sys.exit(0)
    codes += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
print(*codes)
"""


@pytest.mark.slow
def test_who_ends_right_after_the_last_word_ends_well(tmp_path: Path) -> None:
    command = [sys.executable, str(script(tmp_path, PAIRS))]

    ended = subprocess.run(
        command, env=environment({"OMP_NUM_THREADS": "1"}), capture_output=True, text=True, timeout=RUN_LIMIT_S
    )

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["0"] * 16, ended.stderr
