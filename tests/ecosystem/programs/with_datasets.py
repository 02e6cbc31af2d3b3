"""datasets: samples that are mapped by one rank first, split by node, and read by the DataLoader's processes."""

import torch
import torch.distributed as dist
from common import STEPS, step
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
data = Dataset.from_dict({"x": [[float(i), 1.0] for i in range(8 * STEPS * size)]})
data = data.map(lambda row: {"y": [sum(row["x"])]}).with_format("torch")
loader = DataLoader(split_dataset_by_node(data, rank, size), batch_size=8, num_workers=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for number, batch in enumerate(loader, 1):
    torch.nn.functional.mse_loss(model(batch["x"]), batch["y"]).backward()
    optimizer.step()
    optimizer.zero_grad()
    step(number)
dist.destroy_process_group()
