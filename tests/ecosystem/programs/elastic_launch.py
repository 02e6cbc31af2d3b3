"""A worker that launches a job of its own with torch's elastic_launch, as some libraries do."""

import os

import torch
import torch.distributed as dist
from common import STEPS, step
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def inner() -> float:
    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    dist.destroy_process_group()
    return value.item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    # The inner job has a rendezvous of its own.
    outer = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("TORCHELASTIC_")}
    config = LaunchConfig(1, 1, 2, run_id=f"inner-{dist.get_rank()}", rdzv_backend="c10d", rdzv_endpoint="localhost:0")
    assert elastic_launch(config, inner)() == {0: 2.0, 1: 2.0}
    os.environ.update(outer)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for number in range(1, STEPS + 1):
        model(torch.randn(8, 4)).square().mean().backward()
        step(number)
    dist.destroy_process_group()
