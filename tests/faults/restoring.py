"""One generation of a Keeper on a simulated node. Says which step it restored, and to which ranks it sent the state."""

from __future__ import annotations

import json
import os
from collections import Counter

import torch
import torch.distributed as dist

from elaunch.trainer import Keeper
from elaunch.trainer.ranks import peers

# The state is several of these, and anything else that ranks send is less than one.
peers._CHUNK_BYTES = 1 << 20
sent: Counter[int] = Counter()
isend = dist.isend


def counted(tensor: torch.Tensor, target: int, group: dist.ProcessGroup | None = None) -> dist.Work | None:
    sent[target] += tensor.nbytes == peers._CHUNK_BYTES
    return isend(tensor, target, group)


dist.isend = counted  # type: ignore[assignment]
dist.init_process_group("gloo")
generation = int(os.environ["ELAUNCH_GENERATION"])
torch.manual_seed(generation)
model = torch.nn.Linear(1024, 1024)
optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
with Keeper(model, optimizer, snapshot_every=1) as keeper:
    restored, passed_on = keeper.step, dict(+sent)
    for _ in keeper.steps(2):
        with keeper.commit():
            pass
state = [int(each.view(torch.int32).sum()) for each in model.state_dict().values()]
print(json.dumps({"restored": restored, "sent": passed_on, "state": state}))
dist.destroy_process_group()
