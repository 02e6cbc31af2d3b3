"""The part of torch.distributed that tests need: a store, and one group whose ranks reduce integers over sockets."""

from torch.distributed.distributed_c10d import (
    ReduceOp,
    all_reduce,
    destroy_process_group,
    group,
    init_process_group,
    is_available,
    is_initialized,
    new_group,
)
from torch.distributed.tcp_store import TCPStore

__all__ = [
    "ReduceOp",
    "TCPStore",
    "all_reduce",
    "destroy_process_group",
    "group",
    "init_process_group",
    "is_available",
    "is_initialized",
    "new_group",
]
