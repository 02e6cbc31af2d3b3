"""The program is a module of a package, with imports beside it."""

import torch
import torch.distributed as dist
from common import train

from .net import Net


def main() -> None:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, optimizer, lambda: torch.randn(8, 16))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
