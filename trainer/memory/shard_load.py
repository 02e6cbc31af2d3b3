"""Assembles a snapshot from the pieces that the nodes hold, cut to the present world size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from elaunch.trainer.checkpoint.loading import Share
from elaunch.trainer.memory.shard_choice import Choice
from elaunch.trainer.memory.shard_file import Chunk, Layout, StoredPiece, Torn, sum_of
from elaunch.trainer.ranks.agreement import Ranks
from elaunch.trainer.state.tree import State

Box = tuple[str, tuple[int, ...]]


def load(choice: Choice, mine: Mapping[int, StoredPiece], state: State, ranks: Ranks) -> None:
    """Load the snapshot `choice` into every rank's state. `mine` are its pieces on this node, by their rank.

    Collective. A rank gets a piece that its node lacks from the lowest rank whose node has it.
    """
    layouts, packed, sums = _layouts(choice, mine, ranks)
    everything = [chunk for layout in layouts for chunk in layout.chunks]
    share = Share(
        state,
        packed,
        {chunk.name: (torch.Size(chunk.size), chunk.dtype) for chunk in everything},
        {chunk.name: chunk.path for chunk in everything},
        f"the snapshot of step {choice.step}",
    )
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=True)
    planner.set_up_planner(dict(share.tensors), _metadata(everything))
    reads = planner.finish_plan(planner.create_local_plan()).items

    wanted = _by_piece(reads, layouts, list(mine))
    with torch.no_grad():
        for piece in wanted:
            if piece in mine:
                _fill(planner, wanted[piece], layouts[piece], mine[piece].data)
        _exchange(choice, wanted, layouts, sums, mine, ranks, planner)
    share.put()


def _layouts(choice: Choice, mine: Mapping[int, StoredPiece], ranks: Ranks) -> tuple[list[Layout], bytes, list[int]]:
    """The layouts of all pieces by rank, the plain values (from rank 0's piece), and the sums of the tensors' bytes."""
    own = {rank: h for rank, h in mine.items() if choice.holders[rank][0] == ranks.rank}
    told = ranks.from_all({rank: (h.layout_json, h.plain if rank == 0 else b"", h.data_sum) for rank, h in own.items()})
    heads = {rank: head for each in told for rank, head in each.items()}
    pieces = range(len(choice.holders))
    return [Layout.loads(heads[rank][0]) for rank in pieces], heads[0][1], [heads[rank][2] for rank in pieces]


def _metadata(chunks: Sequence[Chunk]) -> records.Metadata:
    """DCP's description of the tensors. A box that several pieces contain is listed once."""
    boxes: dict[str, dict[tuple[int, ...], Chunk]] = {}
    for chunk in chunks:
        boxes.setdefault(chunk.name, {})[chunk.offsets] = chunk
    return records.Metadata(
        {
            name: records.TensorStorageMetadata(
                properties=records.TensorProperties(dtype=next(iter(held.values())).dtype),
                size=torch.Size(next(iter(held.values())).size),
                chunks=[
                    records.ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(chunk.sizes))
                    for offsets, chunk in held.items()
                ],
            )
            for name, held in boxes.items()
        }
    )


def _by_piece(
    reads: Sequence[ReadItem], layouts: Sequence[Layout], near: Sequence[int]
) -> dict[int, list[tuple[ReadItem, Chunk]]]:
    """What to read from which piece. Pieces in `near`, which this node holds, come before others."""
    where: dict[Box, tuple[int, Chunk]] = {}
    for rank in [*(rank for rank in range(len(layouts)) if rank not in near), *near]:
        for chunk in layouts[rank].chunks:
            where[chunk.name, chunk.offsets] = rank, chunk
    wanted: dict[int, list[tuple[ReadItem, Chunk]]] = {}
    for read in reads:
        offsets = read.storage_index.offset
        assert offsets is not None
        rank, chunk = where[read.storage_index.fqn, tuple(offsets)]
        wanted.setdefault(rank, []).append((read, chunk))
    return wanted


def _exchange(
    choice: Choice,
    wanted: Mapping[int, list[tuple[ReadItem, Chunk]]],
    layouts: Sequence[Layout],
    sums: Sequence[int],
    mine: Mapping[int, StoredPiece],
    ranks: Ranks,
    planner: DefaultLoadPlanner,
) -> None:
    """Send and receive whole pieces one after the other, in the same order on all ranks.

    Raises Torn if a piece arrives changed. Then this start has failed, and the next one may succeed.
    """
    needs = ranks.from_all(sorted(piece for piece in wanted if piece not in mine))
    for piece in range(len(layouts)):
        holder = choice.holders[piece][0]
        for taker in (rank for rank, lacking in enumerate(needs) if piece in lacking):
            if ranks.rank == holder and layouts[piece].length:
                dist.send(mine[piece].data, dist.get_global_rank(ranks.group, taker), ranks.group)  # type: ignore[arg-type]
            elif ranks.rank == taker:
                data = torch.empty(layouts[piece].length, dtype=torch.uint8)
                dist.recv(data, dist.get_global_rank(ranks.group, holder), ranks.group)  # type: ignore[arg-type]
                if sum_of(data) != sums[piece]:
                    raise Torn(f"rank {piece}'s part of the snapshot arrived damaged from rank {holder}")
                _fill(planner, wanted[piece], layouts[piece], data)


def _fill(planner: DefaultLoadPlanner, reads: Sequence[tuple[ReadItem, Chunk]], layout: Layout, data: Tensor) -> None:
    for read, chunk in reads:
        source = chunk.view(data)
        for dimension, (offset, length) in enumerate(zip(read.storage_offsets, read.lengths, strict=True)):
            source = source.narrow(dimension, offset, length)
        planner.resolve_tensor(read).detach().copy_(source)
