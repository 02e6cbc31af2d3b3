# The data set's own error, which torch raises again in the rank.
# options: --preload torch
# headline: raised (?:KeyError|FileNotFoundError): .*shard
# next: the path is relative
# not: Next step.*num_workers
# slow

import os
import signal

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info


class Samples(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return open(f'shard-{index}').read()


for batch in DataLoader(Samples(), num_workers=1):
    pass
