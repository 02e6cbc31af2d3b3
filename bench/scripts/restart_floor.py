"""The least that a restart of WORKERS ranks takes on this host: the kernel ends the old ones, gloo joins the new ones.

    python bench/scripts/restart_floor.py WORKERS [ROUNDS]

The new ones were forked before, and wait. No launcher takes part: nothing is detected, decided, written or kept. Prints
one line of JSON with medians and the 95th percentiles (s), from the first SIGKILL: until all old processes are gone,
and until the last new one has reduced.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from statistics import median, quantiles

import torch
import torch.distributed as dist

# Work of a generation before it is killed.
TRAINS_S = 0.3


@dataclass
class Group:
    """Processes that wait for an order: a port. Each writes a byte when it has reduced."""

    pids: list[int]
    orders: list[int]
    reduced: int

    @classmethod
    def forked(cls, workers: int) -> Group:
        reduced, done = os.pipe()
        group = cls([], [], reduced)
        for rank in range(workers):
            waits, order = os.pipe()
            pid = os.fork()
            if not pid:
                # The others' pipes must end with this process's parent.
                for fd in (order, reduced, *group.orders):
                    os.close(fd)
                work(rank, workers, int(os.read(waits, 8)), done)
            os.close(waits)
            group.pids.append(pid)
            group.orders.append(order)
        os.close(done)
        return group

    def start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        for order in self.orders:
            os.write(order, str(port).encode())
        for _ in self.pids:
            assert os.read(self.reduced, 1), "a rank has ended"

    def end(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        for pid in self.pids:
            os.waitpid(pid, 0)
        for fd in (*self.orders, self.reduced):
            os.close(fd)


def work(rank: int, workers: int, port: int, done: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=workers)
    dist.all_reduce(torch.ones(1))
    os.write(done, b"1")
    # Until it is killed.
    signal.pause()


def main() -> None:
    workers, rounds = int(sys.argv[1]), int((sys.argv[2:] or ["20"])[0])
    torch.set_num_threads(1)
    gone, reduced = [], []
    old = Group.forked(workers)
    old.start()
    for _ in range(rounds):
        new = Group.forked(workers)
        time.sleep(TRAINS_S)
        begun_s = time.monotonic()
        old.end()
        gone.append(time.monotonic() - begun_s)
        new.start()
        reduced.append(time.monotonic() - begun_s)
        old = new
    old.end()
    found = {"gone_s": gone, "reduced_s": reduced}
    times = {name: [round(median(each), 4), round(quantiles(each, n=20)[-1], 4)] for name, each in found.items()}
    print(json.dumps({"workers": workers, "rounds": rounds, **times}))


if __name__ == "__main__":
    main()
