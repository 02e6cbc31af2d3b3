# options: --preload torch
# shm: 1m
# headline: raised RuntimeError: (?:.*/dev/shm has 1 MiB in all)
# next: --shm-size
# not: num_workers=0
# slow

import os
import signal

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info


class Samples(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.ones(1 << 20)


for batch in DataLoader(Samples(), num_workers=1):
    pass
