"""A program that starts its own ranks with multiprocessing. The launcher starts one process, and sees one."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import STEPS, step

RANKS = 2


def train(rank: int, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for number in range(1, STEPS + 1):
        model(torch.randn(8, 4)).square().mean().backward()
        step(number)
    dist.destroy_process_group()


if __name__ == "__main__":
    # The port of the launcher is the launcher's.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(train, args=(port,), nprocs=RANKS)
