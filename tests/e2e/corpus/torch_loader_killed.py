# options: --preload torch
# headline: raised RuntimeError: DataLoader worker \(pid
# next: most often the kernel killed it
# not: shm
# slow

import os
import signal

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info


class Samples(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)


for batch in DataLoader(Samples(), num_workers=1):
    pass
