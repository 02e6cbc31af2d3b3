"""An embedding whose gradient has only the rows that a batch has used: DDP exchanges those rows.

    elaunch --nproc-per-node 2 examples/ddp/sparse_gradients.py

It runs on CPUs with gloo, also where there are GPUs: NCCL adds no sparse tensors. Each sparse parameter has a bucket of
its own, and `gradient_as_bucket_view` has no effect on it.
"""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
RANK, WORLD_SIZE = dist.get_rank(), dist.get_world_size()
ROWS, WIDTH, WORDS = 10_000, 16, 8


def trained(*, sparse: bool) -> tuple[torch.Tensor, int]:
    """The table after one step of SGD, and the number of rows in the exchanged gradient."""
    torch.manual_seed(0)
    table = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=sparse)
    model = DistributedDataParallel(nn.Sequential(table, nn.Linear(WIDTH, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # Each rank uses words of its own, and word 0.
    words = torch.arange(WORDS) * (RANK + 1)
    model(words.view(1, -1)).sum().backward()
    gradient = table.weight.grad
    rows = len(gradient.coalesce().values()) if sparse else len(gradient)
    optimizer.step()
    return table.weight.detach(), rows


dense, all_rows = trained(sparse=False)
sparse, used_rows = trained(sparse=True)

used = {int(word) for rank in range(WORLD_SIZE) for word in torch.arange(WORDS) * (rank + 1)}
assert used_rows == len(used), (used_rows, used)
assert torch.allclose(dense, sparse, atol=1e-7)
if RANK == 0:
    # A row travels with its number, an int64.
    print(f"dense:  {all_rows} rows, {all_rows * WIDTH * 4:,} bytes of gradient in each rank")
    print(f"sparse: {used_rows} rows, {WORDS * (WIDTH * 4 + 8):,} bytes from each rank; the same table after the step")
# DDP is in a cycle of references. Freed when its group is gone, it may wait without an end (torch 2.13).
gc.collect()
dist.destroy_process_group()
