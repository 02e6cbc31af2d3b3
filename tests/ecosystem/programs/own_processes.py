"""A launcher as older projects have it: it starts a Python for each rank, and ends all of them when one fails."""

import os
import socket
import subprocess
import sys
import time

RANKS = 2


def train() -> None:
    import torch
    import torch.distributed as dist
    from common import STEPS, step

    dist.init_process_group("gloo", init_method="env://")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for number in range(1, STEPS + 1):
        model(torch.randn(8, 4)).square().mean().backward()
        step(number)
    dist.destroy_process_group()


def launch() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(RANKS))
    ranks = [
        subprocess.Popen([sys.executable, __file__, "rank"], env={**env, "RANK": str(rank)}) for rank in range(RANKS)
    ]
    while any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks):
            for rank in ranks:
                rank.terminate()
            return 1
        time.sleep(0.05)
    return max(rank.returncode for rank in ranks)


if sys.argv[1:] == ["rank"]:
    train()
else:
    sys.exit(launch())
