"""All of c10d's exchanges in one tour: point to point, collectives on tensors and on objects, and groups.

    elaunch --nproc-per-node 2 examples/c10d/collectives.py

Each rank's tensor is [rank]. The comment beside each exchange says what the ranks have afterwards, for ranks 0, 1, 2 …
"""

import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
RANK, N = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
EVERYONE, SUM = list(range(N)), sum(range(N))


def own(*values: int) -> Tensor:
    return torch.tensor(values or [RANK], device=device)


def several(count: int = N) -> list[Tensor]:
    return [own(-1) for _ in range(count)]


def check(name: str, found: Tensor | list[Tensor], expected: list[int]) -> None:
    """Compare, and say on rank 0 what this rank has."""
    values = [int(value) for tensor in (found if isinstance(found, list) else [found]) for value in tensor.flatten()]
    assert values == expected, (name, RANK, values, expected)
    if RANK == 0:
        print(f"{name:<28}{values}", flush=True)


def has(exchange: Callable[[], object]) -> bool:
    """Do the exchange. False if the backend does not have it, which all ranks find out alike."""
    try:
        exchange()
    except RuntimeError as error:
        if "does not support" not in str(error):
            raise
        return False
    return True


def point_to_point() -> None:
    left, right = (RANK - 1) % N, (RANK + 1) % N
    # send and recv wait for each other: if all ranks sent first, a ring could wait forever.
    got = own(-1)
    if N > 1:
        if RANK == 0:
            dist.send(own(7), dst=N - 1)
        if RANK == N - 1:
            dist.recv(got, src=0)
            assert int(got) == 7
        # isend and irecv come back at once, and `wait` ends when the tensor has gone or come.
        if RANK == 0:
            dist.isend(own(8), dst=N - 1).wait()
        if RANK == N - 1:
            dist.irecv(got, src=0).wait()
            assert int(got) == 8
        # Both directions at once: each rank has its left neighbour's number.
        got = own(-1)
        ring = [dist.P2POp(dist.isend, own(), right), dist.P2POp(dist.irecv, got, left)]
        for transfer in dist.batch_isend_irecv(ring):
            transfer.wait()
        check("batch_isend_irecv in a ring", got, [left])


def one_to_all_and_back() -> None:
    tensor = own()
    dist.broadcast(tensor, src=N - 1)  # N-1 everywhere
    check("broadcast", tensor, [N - 1])
    tensor = own()
    dist.scatter(tensor, [own(10 * rank) for rank in EVERYONE] if RANK == 0 else None, src=0)  # 0, 10, 20 …
    check("scatter", tensor, [10 * RANK])
    parts = several() if RANK == 0 else None
    dist.gather(own(), parts, dst=0)  # rank 0: [0, 1, …]
    check("gather", parts or [], EVERYONE if RANK == 0 else [])
    tensor = own()
    dist.reduce(tensor, dst=0)  # rank 0: the sum; what the others have is not defined
    if RANK == 0:
        check("reduce", tensor, [SUM])


def all_to_all() -> None:
    tensor = own()
    dist.all_reduce(tensor)  # the sum everywhere
    check("all_reduce", tensor, [SUM])
    tensor = own()
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    check("all_reduce, MAX", tensor, [N - 1])
    parts = several()
    dist.all_gather(parts, own())  # [0, 1, …] everywhere
    check("all_gather", parts, EVERYONE)
    # torch 2.13 has these two names, earlier releases `all_gather_into_tensor` and `reduce_scatter_tensor`.
    whole = own(*[-1] * N)
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(whole, own())  # the same as one tensor
    check("all_gather_single", whole, EVERYONE)
    part = own(-1)
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(part, own(*EVERYONE))  # rank r: N·r
    check("reduce_scatter_single", part, [N * RANK])
    swapped = own(*[-1] * N)
    dist.all_to_all_single(swapped, own(*(10 * RANK + rank for rank in EVERYONE)))  # rank r: [r, 10+r, 20+r …]
    check("all_to_all_single", swapped, [10 * rank + RANK for rank in EVERYONE])
    # The same two from lists. gloo has them only in newer releases of torch.
    part, parts = own(-1), several()
    if has(lambda: dist.reduce_scatter(part, [own(rank) for rank in EVERYONE])):
        check("reduce_scatter", part, [N * RANK])
    if has(lambda: dist.all_to_all(parts, [own(10 * RANK + rank) for rank in EVERYONE])):
        check("all_to_all", parts, [10 * rank + RANK for rank in EVERYONE])
    # It goes on while this rank computes, until `wait`.
    tensor = own()
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    check("all_reduce, async_op", tensor, [SUM])


def objects() -> None:
    """They travel as pickles: slow, and only between ranks that trust each other."""
    notes: list[object] = [None] * N
    dist.all_gather_object(notes, {"rank": RANK})
    assert notes == [{"rank": rank} for rank in EVERYONE]
    said = [f"from rank {RANK}"]
    dist.broadcast_object_list(said, src=0)
    assert said == ["from rank 0"]
    mine: list[object] = [None]
    dist.scatter_object_list(mine, [f"for rank {rank}" for rank in EVERYONE] if RANK == 0 else None, src=0)
    assert mine == [f"for rank {RANK}"]
    gathered: list[object] | None = [None] * N if RANK == 0 else None
    dist.gather_object(f"of rank {RANK}", gathered, dst=0)
    assert gathered == ([f"of rank {rank}" for rank in EVERYONE] if RANK == 0 else None)
    if N > 1 and RANK == 0:
        dist.send_object_list(["from the first"], dst=N - 1)
    if N > 1 and RANK == N - 1:
        sent: list[object] = [None]
        dist.recv_object_list(sent, src=0)
        assert sent == ["from the first"]
    if RANK == 0:
        print(f"objects                     {notes[-1]}, {said[0]!r}, {mine[0]!r}", flush=True)


def groups() -> None:
    # All ranks make all groups, in the same order, also those that they are not in.
    even = dist.new_group(EVERYONE[::2])
    if RANK in EVERYONE[::2]:
        tensor = own()
        dist.all_reduce(tensor, group=even)
        check("all_reduce of even ranks", tensor, [sum(EVERYONE[::2])])
    # It names the rank that does not come. It needs gloo, so with NCCL it has a group of its own.
    control = dist.new_group(backend="gloo")
    dist.monitored_barrier(control, timeout=timedelta(seconds=60), wait_all_ranks=True)
    dist.barrier()
    if RANK == 0:
        print("monitored_barrier, barrier  all ranks are here", flush=True)


point_to_point()
one_to_all_and_back()
all_to_all()
objects()
groups()
dist.destroy_process_group()
