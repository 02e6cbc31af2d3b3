"""The part of torch.distributed that tests need: a store, and one group whose ranks reduce integers over sockets."""

from torch.distributed.distributed_c10d import (
    ReduceOp,
    all_reduce,
    destroy_process_group,
    get_backend_config,
    get_rank,
    get_world_size,
    group,
    init_process_group,
    is_available,
    is_initialized,
)
from torch.distributed.tcp_store import TCPStore

__all__ = [
    "ReduceOp",
    "TCPStore",
    "all_reduce",
    "destroy_process_group",
    "get_backend_config",
    "get_rank",
    "get_world_size",
    "group",
    "init_process_group",
    "is_available",
    "is_initialized",
]
