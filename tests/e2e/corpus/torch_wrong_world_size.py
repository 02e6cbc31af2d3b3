# options: --preload torch
# workers: 2
# headline: rank [01] .*raised torch\.distributed\.DistStoreError: wait timeout after 3000ms
# next: not all ranks came to init_process_group: leave rank= and world_size= out
# slow

import datetime
import os

import torch.distributed as dist

dist.init_process_group(
    "gloo", rank=int(os.environ["RANK"]), world_size=4, timeout=datetime.timedelta(seconds=3)
)
