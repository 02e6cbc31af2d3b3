"""One generation of a Keeper on a simulated node. Says which step it restored, and to which ranks it sent the state.

The process group moves nothing, as one of NCCL alone moves nothing in host memory.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

# Registers the backend.
import torch.testing._internal.distributed.fake_pg

from elaunch.trainer import Keeper
from elaunch.trainer.ranks.connections import Connections

# Anything else that ranks send is less than this, and the state is more.
STATE_BYTES = 3 << 20
sent: Counter[int] = Counter()
queue = Connections._queue


def counted(self: Connections, rank: int, parts: Any) -> None:
    parts = list(parts)
    sent[rank] += sum(map(len, parts))
    queue(self, rank, parts)


Connections._queue = counted  # type: ignore[method-assign]
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world_size, rank == 0)
dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
generation = int(os.environ["ELAUNCH_GENERATION"])
torch.manual_seed(generation)
model = torch.nn.Linear(1024, 1024)
optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
with Keeper(model, optimizer, lose_at_most=1) as keeper:
    restored, passed_on = keeper.step, [rank for rank, length in sent.items() if length > STATE_BYTES]
    for _ in keeper.steps(2):
        with keeper.commit():
            pass
state = [int(each.view(torch.int32).sum()) for each in model.state_dict().values()]
print(json.dumps({"restored": restored, "sent": passed_on, "state": state}))
# Rank 0 has the store.
keeper._peers.apart("end").largest([rank])
