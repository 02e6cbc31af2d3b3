"""The program is a module of a package, with imports beside it."""

import torch
import torch.distributed as dist
from common import STEPS, step

from .net import Net


def main() -> None:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(1, STEPS + 1):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step(number)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
