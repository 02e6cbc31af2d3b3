# options: --preload torch
# headline: raised ValueError: Default process group has not been initialized
# next: init_process_group\(\) before the first collective
# slow

import torch
import torch.distributed as dist

dist.all_reduce(torch.zeros(1))
