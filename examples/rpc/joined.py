"""Joins the job's RPC group. Each process is named after its role and its rank in it: `ps0`, `trainer0`, `trainer1`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import rpc

from elaunch.trainer import link


@contextmanager
def joined(*, follows: bool = False, timeout_s: float = 60.0) -> Iterator[str]:
    """A process of the group, with its name. An RPC that takes longer than `timeout_s` raises RuntimeError.

    A process that `follows` has no state of its own: when the job is to stop, it works on until another one, which
    saves the state, lets it end.
    """
    name = f"{os.environ['ROLE_NAME']}{os.environ['ROLE_RANK']}"
    rpc.init_rpc(
        name,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        # TCP, also within a host. TensorPipe's shared memory has a thread in each process that never sleeps.
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            rpc_timeout=timeout_s, _transports=["uv"], _channels=["basic"]
        ),
    )
    if follows:
        # Without this it would get SIGTERM at a stop. After a failure it gets that all the same, and ends at once.
        link.listen(on_stop=lambda reason: None)
    try:
        yield name
    except Exception:
        # No shutdown: it waits for all others, and they may wait for this process. The launcher ends them.
        raise
    except SystemExit:
        rpc.shutdown()
        raise
    rpc.shutdown()


def names(role: str) -> list[str]:
    """The names of all processes of a role."""
    found: list[str] = []
    while True:
        try:
            found.append(rpc.get_worker_info(f"{role}{len(found)}").name)
        except RuntimeError:
            return found
