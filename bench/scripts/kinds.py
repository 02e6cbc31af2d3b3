"""The kinds of state of which each rank has a part alone, for scripts that keep one."""

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW


def spread(kind: str, network: nn.Module, lr: float) -> tuple[nn.Module, Any, Any]:
    """The model, its optimizer and the state of its communication hook. `kind` is in lower case."""
    if kind in ("fsdp2", "hsdp"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        ranks = dist.get_world_size()
        shape, names = ((2, ranks // 2), ("replicas", "shards")) if kind == "hsdp" else ((ranks,), ("shards",))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        if isinstance(network, nn.Sequential):
            for layer in network:
                fully_shard(layer, mesh=mesh)
        fully_shard(network, mesh=mesh)
        return network, AdamW(network.parameters(), lr=lr), None
    if kind == "powersgd":
        # It reduces several buckets in any order, and gloo fails then.
        dist._DEFAULT_FIRST_BUCKET_BYTES = 1 << 40  # type: ignore[attr-defined]
    model = DistributedDataParallel(network, bucket_cap_mb=10_000 if kind == "powersgd" else None)
    if kind == "zero-1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return model, ZeroRedundancyOptimizer(network.parameters(), AdamW, lr=lr), None
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=3)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model, AdamW(network.parameters(), lr=lr, fused=True), state
