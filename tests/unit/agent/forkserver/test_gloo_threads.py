"""gloo's threads: which they are, and what their peers hear when a rank is about to end."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch.agent.forkserver.gloo_threads import GlooThreads
from tests.harness import DEADLINE_S

# Rank 1 waits for rank 0, which half-closes its connections and lives on until rank 1 has said what it got.
PAIR = """
import os, sys
import torch
import torch.distributed as dist
from elaunch.agent.forkserver.gloo_threads import GlooThreads

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
if rank == 0:
    dist.barrier()
    gloo = GlooThreads()
    while not gloo.tids:
        gloo.look()
    ours, theirs = __import__("socket").socketpair()
    gloo.half_close()
    theirs.send(b"x")
    print("sockets of the program's own work" if ours.recv(1) == b"x" else "", flush=True)
    sys.stdin.readline()
else:
    try:
        dist.barrier()
        dist.broadcast(torch.ones(1), src=0)
    except RuntimeError as error:
        print(error, flush=True)
os._exit(0)
"""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PAIR, str(rank), str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    yield started
    for each in started:
        with each:
            each.kill()


def test_a_peer_that_waits_hears_of_the_end_before_the_process_is_gone(pair: list[subprocess.Popen[str]]) -> None:
    ending, waiting = pair
    assert ending.stdout
    assert waiting.stdout

    assert ending.stdout.readline() == "sockets of the program's own work\n"
    assert select.select([waiting.stdout], [], [], DEADLINE_S)[0], "rank 1 still waits"

    assert "onnection closed by peer" in waiting.stdout.readline()
    assert ending.poll() is None


def test_a_process_without_gloo_closes_nothing() -> None:
    ours, theirs = socket.socketpair()
    gloo = GlooThreads()

    with ours, theirs, select.epoll() as epoll:
        epoll.register(ours)
        gloo.look()
        gloo.half_close()
        theirs.send(b"x")

        assert not gloo.tids
        assert ours.recv(1) == b"x"
        ours.send(b"y")
        assert theirs.recv(1) == b"y"
