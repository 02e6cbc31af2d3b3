"""What it costs that ranks meet, agree and send: over the trainer's own connections, and over a new group of gloo.

    python bench/scripts/meeting.py WORLD_SIZE [ROUNDS]

Forks the ranks, which all run on this host. Each round makes new connections and makes a gloo group, in turns. Prints
one line of JSON with medians: wall-clock and CPU seconds (of all ranks) to meet and exchange one object per rank, the
seconds of one `largest` of four integers and of gloo's all-reduce, and those of 100 MB from rank 0 to rank 1.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elaunch.trainer.ranks.peers import Peers

CALLS = 50
REGION_BYTES = 100_000_000
VALUE = {"node": "node-0", "holdings": [(3, 1000, 123456789)] * 2}


def main() -> None:
    world_size, rounds = int(sys.argv[1]), int((sys.argv[2:] or ["5"])[0])
    torch.set_num_threads(1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    children = []
    for rank in range(1, world_size):
        child = os.fork()
        if not child:
            try:
                measure(rank, world_size, rounds)
            finally:
                os._exit(0)
        children.append(child)
    found = measure(0, world_size, rounds)
    for child in children:
        os.waitpid(child, 0)
    print(json.dumps({"ranks": world_size, "rounds": rounds, **found}))


def measure(rank: int, world_size: int, rounds: int) -> dict[str, float]:
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", int(os.environ["MASTER_PORT"]), world_size, rank == 0, timeout=timedelta(seconds=300)
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    took: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], Any], times: int = 1) -> Any:
        dist.barrier()
        begun_s, cpu_s = time.perf_counter(), time.process_time()
        for _ in range(times):
            result = call()
        spent = torch.tensor([time.perf_counter() - begun_s, time.process_time() - cpu_s], dtype=torch.float64)
        slowest, cpu = spent[:1].clone(), spent[1:].clone()
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        dist.all_reduce(cpu)
        took.setdefault(f"{name}_s", []).append(float(slowest) / times)
        took.setdefault(f"{name}_cpu_s", []).append(float(cpu) / times)
        return result

    # Once without measuring: the first time imports and allocates.
    Peers().from_all(VALUE)
    for _ in range(rounds):
        compare(timed, rank, world_size)
    return {name: round(statistics.median(each), 6) for name, each in took.items()}


def compare(timed: Callable[..., Any], rank: int, world_size: int) -> None:
    """One round."""
    ours = timed("meet", lambda: met(Peers()))
    group = timed("gloo_meet", gloo_met)
    timed("largest", lambda: ours.largest([0, 1, 1, 0]), CALLS)
    timed("gloo_largest", lambda: dist.all_reduce(torch.tensor([0, 1, 1, 0]), dist.ReduceOp.MAX, group), CALLS)
    if world_size == 2:
        region, target = torch.ones(REGION_BYTES, dtype=torch.uint8), torch.zeros(REGION_BYTES, dtype=torch.uint8)
        timed("send", lambda: ours.send(region, 1) if rank == 0 else receive(ours, target))
        timed("gloo_send", lambda: dist.send(region, 1, group) if rank == 0 else dist.recv(target, 0, group))
    ours.close()
    dist.destroy_process_group(group)


def met(peers: Peers) -> Peers:
    peers.from_all(VALUE)
    return peers


def receive(peers: Peers, target: torch.Tensor) -> None:
    assert peers.length_from(0) == REGION_BYTES
    peers.receive(target, 0)


def gloo_met() -> Any:
    group = dist.new_group(backend="gloo")
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, VALUE, group=group)
    return group


if __name__ == "__main__":
    main()
