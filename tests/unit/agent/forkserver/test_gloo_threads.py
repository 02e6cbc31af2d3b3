"""gloo's threads: which they are, and what their peers hear when a rank is about to end."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch.agent.forkserver.gloo_threads import GlooThreads
from tests.harness import DEADLINE_S

# Rank 1 waits for rank 0, which half-closes its connections and lives on until rank 1 has said on stderr what it got.
# Both are forked from one import of torch.
PAIR = """
import ctypes, os, sys
import torch
import torch.distributed as dist
from elaunch.agent.forkserver.gloo_threads import GlooThreads

folder = sys.argv[1]
rank = 0 if os.fork() else 1
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
if rank == 0:
    dist.barrier()
    gloo = GlooThreads()
    while not gloo.tids:
        gloo.look()
    ours, theirs = __import__("socket").socketpair()
    gloo.half_close(ctypes)
    theirs.send(b"x")
    print("sockets of the program's own work" if ours.recv(1) == b"x" else "", flush=True)
    sys.stdin.readline()
else:
    try:
        dist.barrier()
        dist.broadcast(torch.ones(1), src=0)
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
os._exit(0)
"""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", PAIR, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    ) as rank_0:
        yield rank_0
        os.killpg(rank_0.pid, signal.SIGKILL)


def test_a_peer_that_waits_hears_of_the_end_before_the_process_is_gone(pair: subprocess.Popen[str]) -> None:
    assert pair.stdout
    assert pair.stderr

    assert pair.stdout.readline() == "sockets of the program's own work\n"
    assert select.select([pair.stderr], [], [], DEADLINE_S)[0], "rank 1 still waits"

    assert "onnection closed by peer" in pair.stderr.readline()
    assert pair.poll() is None


def test_a_process_without_gloo_closes_nothing() -> None:
    ours, theirs = socket.socketpair()
    gloo = GlooThreads()

    with ours, theirs, select.epoll() as epoll:
        epoll.register(ours)
        gloo.look()
        gloo.half_close(ctypes)
        theirs.send(b"x")

        assert not gloo.tids
        assert ours.recv(1) == b"x"
        ours.send(b"y")
        assert theirs.recv(1) == b"y"
