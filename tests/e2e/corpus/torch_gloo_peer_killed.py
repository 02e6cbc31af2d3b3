# options: --preload torch
# workers: 2
# headline: rank 1 .* was killed by SIGKILL in generation 0
# next: find .*sender: .*kill -9
# not: ^rank 0 \(|out of memory|more memory
# slow

import os
import signal

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.zeros(1))
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.zeros(1))
