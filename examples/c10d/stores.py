"""How ranks find each other: the stores behind `init_process_group`, and what a store can do by itself.

    elaunch --nproc-per-node 2 examples/c10d/stores.py

elaunch's workers meet at MASTER_ADDR:MASTER_PORT, where a process of elaunch's serves a TCPStore for one generation
(`env://`, the default). A FileStore needs a file that all ranks see and that is new for each generation; a HashStore is
for one process.
"""

import os
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def sum_of_ranks() -> int:
    tensor = torch.tensor([RANK])
    dist.all_reduce(tensor)
    return int(tensor)


def say(text: str) -> None:
    if RANK == 0:
        print(text, flush=True)


# env://: elaunch's TCPStore. The ranks' names in it go below a prefix of their own.
dist.init_process_group("gloo")
assert sum_of_ranks() == sum(range(WORLD_SIZE))
store = dist.PrefixStore("tour", dist.distributed_c10d._get_default_store())

# What a store can do: set, get (waits until the key is there), add (atomic), wait, check, compare_set, delete_key.
if RANK == 0:
    store.set("word", "elaunch")
assert store.get("word") == b"elaunch"
last = store.add("arrived", 1) == WORLD_SIZE
if last:
    store.set("all", "here")
store.wait(["all"], timedelta(seconds=60))
assert store.check(["all", "word"])
assert not store.check(["nobody wrote this"])
# The first rank's word stays: the others expect "" and find another.
leader = store.compare_set("leader", "", str(RANK)).decode()
try:
    store.wait(["never"], timedelta(milliseconds=50))
except dist.DistStoreError as error:
    say(f"a key that never comes: {str(error).splitlines()[0][:60]}…")
else:
    raise AssertionError("a wait for a key that never comes has ended")
leaders = [None] * WORLD_SIZE
dist.all_gather_object(leaders, leader)
assert len(set(leaders)) == 1
served = store
while isinstance(served, dist.PrefixStore):
    served = served.underlying_store
say(f"env://: a {type(served).__name__} below a prefix; rank {leader} was first")

# Rank 0 tells the others, over the first group, where to meet next.
place = [tempfile.mkdtemp(prefix="elaunch_example_") if RANK == 0 else None, None]
if RANK == 0:
    own = dist.TCPStore("127.0.0.1", 0, WORLD_SIZE, is_master=True, wait_for_workers=False)
    place[1] = own.port
dist.broadcast_object_list(place, src=0)
dist.destroy_process_group()

# A TCPStore of the program's own, given as an object.
if RANK != 0:
    own = dist.TCPStore("127.0.0.1", place[1], WORLD_SIZE, is_master=False)
dist.init_process_group("gloo", store=own, rank=RANK, world_size=WORLD_SIZE)
assert sum_of_ranks() == sum(range(WORLD_SIZE))
say(f"TCPStore of rank 0 at port {place[1]}: the same sum")
dist.destroy_process_group()

# A file on a disk that all ranks share.
file = Path(place[0]) / "meeting"
dist.init_process_group("gloo", init_method=f"file://{file}", rank=RANK, world_size=WORLD_SIZE)
assert sum_of_ranks() == sum(range(WORLD_SIZE))
dist.barrier()
say(f"FileStore in {file.name}: the same sum")
dist.destroy_process_group()

# In one process: a group of one, which needs no address.
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert dist.get_world_size() == 1
say("HashStore: a group of one in each process")
dist.destroy_process_group()

# A FileStore removes its file when its last user leaves, and rank 0's TCPStore ends with rank 0. So rank 0 leaves last.
own.set(f"left {RANK}", "")
if RANK == 0:
    own.wait([f"left {rank}" for rank in range(WORLD_SIZE)])
    file.unlink(missing_ok=True)
    file.parent.rmdir()
