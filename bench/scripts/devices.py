"""The device and backend of each rank: a GPU of its own, one GPU for all if there are too few, or a CPU with gloo.

NCCL refuses two ranks on one GPU of one host, and compares hosts by a hash that NCCL_HOSTID replaces. If each rank has
another one, ranks share a GPU and communicate through sockets, as on several hosts. That shows neither NVLink nor
shared memory, and no speed: the kernels of the ranks take turns.

Variable: BENCH_DEVICE=cpu, to leave GPUs alone.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])
CUDA = os.environ.get("BENCH_DEVICE") != "cpu" and torch.cuda.is_available()
IS_SHARED = CUDA and torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"])
DEVICE = torch.device("cuda", 0 if IS_SHARED else int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")
_SHARED = {
    "NCCL_HOSTID": f"rank-{RANK}",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
}


def make_context() -> torch.device:
    """Create the CUDA context, since a device mesh would choose the GPU of LOCAL_RANK. Returns the device."""
    if CUDA:
        torch.cuda.set_device(DEVICE)
        torch.zeros(1, device=DEVICE)
        torch.cuda.synchronize()
    return DEVICE


def join_group(timeout_s: float = 60.0) -> torch.device:
    """Initialize the process group. Returns the device, which has its context."""
    make_context()
    if IS_SHARED:
        os.environ.update(_SHARED)
    dist.init_process_group("nccl" if CUDA else "gloo", timeout=timedelta(seconds=timeout_s))
    return DEVICE


def finish() -> None:
    """Wait for all work on the device."""
    if CUDA:
        torch.cuda.synchronize()
