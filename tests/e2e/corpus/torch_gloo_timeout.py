# Rank 1 does not come, and is not dead: nothing may be said of its end.
# options: --preload-only torch
# workers: 2
# headline: rank 0 .* lost a peer in all_reduce \(RuntimeError: .*Timed out waiting 2000ms
# next: one rank did not come to this collective
# not: rank 1 \(.* (?:raised|was killed|exited)
# slow

import datetime
import signal

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2))
if dist.get_rank() == 1:
    signal.pause()
dist.all_reduce(torch.zeros(1))
