"""agent.diagnosis.flight_recorder and agent.forkserver.collectives: two ranks with gloo, while they run and hang."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from elaunch.agent.diagnosis import stacks
from elaunch.agent.diagnosis.collectives import LOOKS, WaitShares, last_entered
from elaunch.agent.diagnosis.flight_recorder import FlightRecorder
from elaunch.agent.workers.link import Link
from elaunch.rendezvous.rules.snapshot import seats_of
from elaunch.rendezvous.types import RankTable
from tests.harness import DEADLINE_S, environment, free_ports, wait_for

LOOK_S = 0.005
REST = b'"last_started_collective": -1, "last_completed_collective": 0}}}'
# Rank 1 sleeps before each collective: it uses no CPU, so nothing but the numbers shows that the other waits for it.
# At a line on stdin it enters none, and at the next one it goes on.
PROGRAM = """
import json, os, select, sys, threading, warnings
os.dup2(int(sys.argv[1]), 3)
from elaunch.agent.forkserver import collectives
collectives.prepare(None)
finders = len(sys.meta_path)
import torch, torch.distributed as dist
def tasks(): return len(os.listdir("/proc/self/task"))
def sockets(): return sum(os.readlink(f"/proc/self/fd/{fd}").startswith("socket") for fd in os.listdir("/proc/self/fd")
                          if os.path.lexists(f"/proc/self/fd/{fd}"))
rank = int(os.environ["RANK"])
facts = {"finders": [finders, len(sys.meta_path)], "before": tasks()}
dist.init_process_group("gloo")
facts["threads"] = [thread.name for thread in threading.enumerate()]
read, write = os.pipe()
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    mine = sockets()
    if os.fork() == 0:
        os.write(write, str(mine - sockets()).encode())
        os._exit(0)
facts["closed_after_fork"] = int(os.read(read, 10))
facts["warned"] = len(warned)
ends = torch.zeros(1)
while not ends:
    if rank == 1:
        if select.select([0], [], [], 0.02)[0]:
            sys.stdin.readline()
            sys.stdin.readline()
            ends += 1
    dist.all_reduce(ends)
dist.destroy_process_group()
while tasks() > facts["before"]: pass
print(json.dumps(facts), flush=True)
"""


TABLE = RankTable(0, seats_of([("a", 1, "default"), ("b", 1, "default")]), "127.0.0.1", 1, "")


@dataclass
class Ranks:
    """Two ranks, their agent's ends, and what it says."""

    processes: list[subprocess.Popen[str]]
    links: dict[int, Link]
    said: list[str] = field(default_factory=list)
    generation: int = 0
    table: RankTable = TABLE

    @property
    def recorders(self) -> dict[int, FlightRecorder]:
        return {rank: link.recorder for rank, link in self.links.items() if link.recorder}

    @property
    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in enumerate(self.processes)}

    def rank(self, local_rank: int) -> int:
        return local_rank

    def read(self) -> bool:
        """Read the links. Returns whether both ranks have made the process group."""
        for link in self.links.values():
            link.read()
        return len(self.recorders) == 2


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    (port,) = free_ports(1)
    found = Ranks([], {})
    for rank in range(2):
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        found.links[rank] = Link(0, rank, ours)
        env = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        found.processes.append(
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(theirs.fileno())],
                env=environment({**env, "OMP_NUM_THREADS": "1"}),
                cwd=tmp_path,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=(theirs.fileno(),),
            )
        )
        theirs.close()
    yield found
    for process in found.processes:
        process.kill()
        process.communicate(timeout=DEADLINE_S)
    for link in found.links.values():
        link.forget_recorder()
        link.socket.close()


def test_ranks_tell_their_collectives_while_they_run_and_hang_and_keep_nothing_of_it(
    ranks: Ranks,
) -> None:
    state = WaitShares()
    # Both import torch before.
    wait_for(ranks.read, "both process groups", 4 * DEADLINE_S)

    # A look each LOOK_S, in place of one each second.
    def shares() -> Mapping[int, float] | None:
        nonlocal state
        counts = {rank: recorder.look(time.monotonic()) for rank, recorder in ranks.recorders.items()}
        known = {rank: each for rank, each in counts.items() if each}
        state, found = state.after(known) if len(known) == 2 else (state, None)
        return found

    found_shares = wait_for(shares, f"the shares of {LOOKS} looks", every_s=LOOK_S)
    assert found_shares[0] > 0.5 > found_shares[1], "rank 0 waits for rank 1"

    worker: Any = ranks.processes[1].stdin
    worker.write("stop\n")
    worker.flush()

    def stalled() -> list[int]:
        for recorder in ranks.recorders.values():
            recorder.look(time.monotonic())
        return [rank for rank, recorder in ranks.recorders.items() if recorder.is_stalled(time.monotonic())]

    wait_for(lambda: stalled() == [0] and stalled() == [0] and stalled() == [0], "rank 0 waits in a collective")
    counts = [ranks.recorders[rank].counts for rank in range(2)]
    found = [last_entered(each) for each in counts]
    newest = [max(count.entered for count in each.values()) for each in counts]
    assert newest[0] == newest[1] + 1
    assert [each and (each.words, each.waits) for each in found] == [
        (f"in collective {newest[0]} of the default group", True),
        (f"after collective {newest[1]} of the default group", False),
    ]
    for stack in stacks.take(ranks.pids):
        assert [thread.name for thread in stack.threads if thread.frames and not thread.is_main] == [], stack

    worker.write("go on\n")
    worker.flush()
    for process in ranks.processes:
        out, _ = process.communicate(timeout=180)
        facts = json.loads(out)
        assert facts["finders"][0] == facts["finders"][1] + 1
        assert facts["threads"] == ["MainThread"]
        assert facts["closed_after_fork"] == 1
        assert process.returncode == 0
    # Later looks find nobody, and raise nothing.
    wait_for(lambda: not any(r.look(time.monotonic()) for r in ranks.recorders.values()), "the ends are closed")


@pytest.mark.parametrize("answer", [b"x", b"n[]", b"n\xff", b"e", b"n" + b"9" * 60_000])
def test_an_answer_of_another_form_says_nothing(answer: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    recorder = FlightRecorder(ours.detach())
    with theirs:
        assert recorder.look(1.0) is None
        assert theirs.recv(32) == b"n"
        theirs.send(answer)
        theirs.send(b"n{}")

        assert not recorder.look(2.0)
        assert not recorder.is_stalled(2.0)
        assert recorder.counts == {}
        theirs.close()
        assert recorder.look(3.0) is None
    recorder.close()


def test_a_worker_that_floods_its_agent_is_read_in_order_and_only_in_part_at_each_look() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    recorder = FlightRecorder(ours.detach())
    theirs.setblocking(False)
    sent, looked = 0, []
    with theirs:
        for now_s in range(4):
            with suppress(BlockingIOError):
                while True:
                    theirs.send(b'n{"pg_status": {"0": {"last_enqueued_collective": %d,' % sent + REST)
                    sent += 1
            looked.append(recorder.look(float(now_s)))
    recorder.close()

    seen = [counts[0, 0].entered if counts else -1 for counts in looked]
    assert sent > 32, "the flood is longer than what a look reads"
    assert seen == [15, 31, 47, 63]
