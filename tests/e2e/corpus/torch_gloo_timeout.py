# Rank 1 does not come, and is not dead: it is named, and nothing may be said of its end.
# options: --preload torch
# workers: 2
# headline: rank 1 .* did not come to the collective that timed out on rank 0 \(all_reduce for 2 s\); it waits
# next: see where each rank is: the log has it above
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
