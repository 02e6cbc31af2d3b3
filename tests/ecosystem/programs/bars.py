"""Progress bars: tqdm's over the steps, and a rich table at the end."""

import torch
import torch.distributed as dist
from common import STEPS, step
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for number in tqdm(range(1, STEPS + 1), disable=dist.get_rank() != 0):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step(number)
if dist.get_rank() == 0:
    table = Table("step", "loss")
    table.add_row(str(STEPS), f"{loss.item():.3f}")
    Console().print(table)
dist.destroy_process_group()
