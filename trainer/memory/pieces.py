"""The pieces of a sharded state: how a rank cuts its own, and how a snapshot is assembled from those on the nodes."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from elaunch.trainer.checkpoint.layout import Saved, Targets, local_boxes
from elaunch.trainer.checkpoint.loading import Share
from elaunch.trainer.memory.recovery_plan import Choice, Held, Parts
from elaunch.trainer.memory.slots import Slot, Torn, received
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state.packing import Box, Boxed, Placer, Reference, Shape, describe, pack, values
from elaunch.trainer.state.region import Header, Packed, Piece, data_of, skeleton_of
from elaunch.trainer.state.tree import State, Tree, flatten, is_shard, local_parts

Boxes = list[tuple[Tensor, Shape]]
# Boxes to read from a piece: the tensor's name, the tensor as that piece has it, and the box of it.
Reads = list[tuple[str, Boxed, Box]]


class Cutter:
    """Takes this rank's piece of a state: its boxes of distributed tensors, and its PerRanks.

    With `has_common` the piece also has the tensors that are the same on all ranks. One rank of each node has them.
    """

    def __init__(self, has_common: bool) -> None:
        self._has_common = has_common
        self._offsets: dict[object, list[Shape]] = {}

    def pack(self, state: State, tree: Tree, parts: Parts, whole: str) -> Packed:
        """The piece of `state`, whose tree is `tree`, with its parts and the digest of all. Raises NotPlain."""
        held = {"parts": sorted(parts), "whole": whole, "state": dict(state)}
        own = self._own(tree)
        return pack(held, _Placer(lambda tensor: self._boxes(tensor, id(tensor) in own)))

    def parts(self, tree: Tree) -> Parts:
        """The digests of the parts in this rank's piece: of what all ranks have, and of what this rank has."""
        own = self._own(tree)
        digests = {True: hashlib.sha256(), False: hashlib.sha256()}
        found = set()
        for name, tensor in tree.tensors.items():
            is_own = id(tensor) in own
            for part, offsets in self._boxes(tensor, is_own):
                row = (name, str(tensor.dtype), tuple(tensor.shape), offsets, tuple(part.shape))
                digests[is_own].update(repr(row).encode())
                found.add(is_own)
        return frozenset(f"{'own' if each else 'common'}-{digests[each].hexdigest()[:16]}" for each in found)

    @staticmethod
    def _own(tree: Tree) -> set[int]:
        """The tensors that are not the same on all ranks, by identity."""
        return {id(t) for name, t in tree.tensors.items() if is_shard(t) or tree.owner(tree.paths[name]) is not None}

    def _boxes(self, tensor: Any, is_own: bool) -> Boxes:
        if not is_shard(tensor):
            return local_boxes(tensor) if is_own or self._has_common else []
        if not hasattr(tensor, "placements"):
            return [(part, at) for part, at in local_boxes(tensor) if part.numel()]
        # DTensor takes 0.1 ms for this, so it is kept for each distribution.
        kind = (tensor.shape, tensor.device_mesh, tensor.placements)
        if kind not in self._offsets:
            self._offsets[kind] = [at for _, at in local_boxes(tensor)]
        parts = zip(local_parts(tensor), self._offsets[kind], strict=True)
        return [(part, at) for part, at in parts if part.numel()]


class _Placer(Placer):
    """Places the boxes that `boxes` gives."""

    def __init__(self, boxes: Callable[[Tensor], Boxes]) -> None:
        super().__init__()
        self._boxes = boxes

    def reference(self, tensor: Tensor) -> Reference:
        boxes = tuple((self.once(at), self.once(tuple(part.shape)), self.put(part)) for part, at in self._boxes(tensor))
        return self.once(str(tensor.dtype).removeprefix("torch.")), self.once(tuple(tensor.shape)), boxes


def contents(skeleton: bytes, data_length: int) -> Tree:
    """The state in a piece with that skeleton, with a Boxed for each tensor. Raises Torn if it is not one."""
    try:
        held, *rest = describe(skeleton, data_length)
        return flatten({**held["state"], **dict(*rest)}, Boxed)
    except (pickle.UnpicklingError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise Torn(f"its skeleton cannot be read ({str(error)[:200]})") from error


def boxed(tree: Tree) -> dict[str, Boxed]:
    """The tensors of a tree that `contents` returned, by name."""
    return cast(dict[str, Boxed], tree.tensors)


def held_by(piece: Piece, skeleton: bytes) -> Held:
    """What a piece with that skeleton records of itself. Raises Torn if it is not one."""
    try:
        held = values(skeleton)
        return Held(piece, frozenset(map(str, held["parts"])), str(held["whole"]))
    except (pickle.UnpicklingError, KeyError, TypeError, ValueError) as error:
        raise Torn(f"its skeleton cannot be read ({str(error)[:200]})") from error


@dataclass(frozen=True)
class StoredPiece:
    """A verified piece in this node's memory."""

    slot: Slot
    header: Header

    @property
    def region(self) -> Tensor:
        return self.slot.raw(self.header.length)

    @property
    def skeleton(self) -> bytes:
        return skeleton_of(self.region, self.header)


def load(choice: Choice, mine: Mapping[int, StoredPiece], state: State, peers: Peers) -> None:
    """Load the snapshot `choice` into every rank's state. `mine` are its pieces on this node, by their rank.

    Collective. A rank gets a piece that its node lacks from the lowest rank whose node has it.
    """
    trees = _trees(choice, mine, peers)
    covering = [trees[rank] for rank in choice.holders]
    first = covering[0]
    share = Share(
        state,
        (first.plain, first.common(), list(first.per_rank)),
        {n: Saved(t.dtype, torch.Size(t.size), each.paths[n]) for each in covering for n, t in boxed(each).items()},
        f"the snapshot of step {choice.version.step}",
    )
    targets = Targets(share.tensors)
    wanted = _wanted(targets, trees, mine)
    for rank, reads in wanted.items():
        if rank in mine:
            _fill(targets, reads, data_of(mine[rank].region, mine[rank].header))
    _exchange(choice, wanted, mine, peers, targets)
    share.put()


def _trees(choice: Choice, mine: Mapping[int, StoredPiece], peers: Peers) -> dict[int, Tree]:
    """The states in the chosen pieces, and of this node's other pieces of that snapshot, by rank."""
    mine_to_send = [rank for rank, holders in choice.holders.items() if holders[0] == peers.rank]
    sent = peers.all_gather({rank: (mine[rank].skeleton, mine[rank].header.data_length) for rank in mine_to_send})
    heads = {rank: head for each in sent for rank, head in each.items()}
    heads |= {rank: (piece.skeleton, piece.header.data_length) for rank, piece in mine.items() if rank not in heads}
    return {rank: contents(*head) for rank, head in heads.items()}


def _wanted(targets: Targets, trees: Mapping[int, Tree], near: Iterable[int]) -> dict[int, Reads]:
    """The boxes to read from each piece. Pieces in `near`, which this node holds, come before others."""
    where: dict[tuple[str, Shape], tuple[int, Boxed, Box]] = {}
    for rank in [*(rank for rank in trees if rank not in near), *near]:
        for name, tensor in boxed(trees[rank]).items():
            where |= {(name, box.offsets): (rank, tensor, box) for box in tensor.boxes}
    wanted: dict[int, Reads] = {}
    for (name, offsets), (rank, tensor, box) in where.items():
        if targets.need(name, offsets, box.sizes):
            wanted.setdefault(rank, []).append((name, tensor, box))
    return wanted


def _exchange(
    choice: Choice,
    wanted: Mapping[int, Reads],
    mine: Mapping[int, StoredPiece],
    peers: Peers,
    targets: Targets,
) -> None:
    """Send whole pieces along the ranks that need them, one after the other, in the same order on all ranks.

    Raises Torn if a piece arrives changed. Then this start has failed, and the next one may succeed.
    """
    takers: dict[int, list[int]] = {}
    for taker, lacking in enumerate(peers.all_gather(sorted(rank for rank in wanted if rank not in mine))):
        for rank in lacking:
            takers.setdefault(rank, []).append(taker)
    for rank, holders in choice.holders.items():
        chain = (holders[0], *takers.get(rank, ()))
        if (arrived := peers.relay(chain, mine[rank].region if chain[0] == peers.rank else None)) is not None:
            region, sender = arrived
            header = received(region, choice.piece(rank), sender)
            _fill(targets, wanted[rank], data_of(region, header))


def _fill(targets: Targets, reads: Reads, data: Tensor) -> None:
    for name, tensor, box in reads:
        targets.fill(name, box.offsets, tensor.view(box, data))
