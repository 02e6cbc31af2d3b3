"""DDP with a DataLoader whose worker processes come from Python's own fork server."""

import torch
import torch.distributed as dist
from common import STEPS, step
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(8 * STEPS * dist.get_world_size(), 16))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=1, multiprocessing_context="forkserver")
    model = DistributedDataParallel(torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, (inputs,) in enumerate(loader, 1):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step(number)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
