"""A snapshot of a state in parts, of which rank 1 says that it cannot be copied at each step. Prints its version."""

import datetime
import json
import sys

import torch
import torch.distributed as dist

from elaunch.trainer.memory.sharded import ShardedMemory

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
memory, weights = ShardedMemory(sys.argv[1], generation=0), torch.ones(8)
memory.save(1, {"w": weights}, {}, [weights] if dist.get_rank() == 0 else None)
# A collective of another kind: it fails if a rank is still in one of the snapshot.
ranks: list[int | None] = [None, None]
dist.all_gather_object(ranks, dist.get_rank())
found = memory.newest()
print(json.dumps([ranks, found and found.step]))
dist.destroy_process_group()
