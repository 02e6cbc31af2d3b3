"""Chooses the snapshot of a sharded state that the pieces on the living nodes cover. Pure.

A state consists of *parts*: sets of boxes of its tensors. Peers that hold the same boxes hold the same part, as the
replicas of HSDP do. Each piece says which parts it holds, and has the digest of all parts of the state. So the pieces
of all ranks are not needed, but all parts are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elaunch.trainer.state.version import Piece, Version

Parts = frozenset[str]


@dataclass(frozen=True)
class Held:
    """A whole, verified piece in a node's memory: the parts in it, by their digests, and `digest_of` the state's."""

    piece: Piece
    parts: Parts
    whole: str


@dataclass(frozen=True)
class Choice:
    """The snapshot to load: pieces that cover it, by their rank, with the present ranks whose node holds each."""

    version: Version
    world_size: int
    holders: dict[int, tuple[int, ...]]

    def piece(self, rank: int) -> Piece:
        """The piece of that rank."""
        return Piece(self.version, self.world_size, rank)


def digest_of(parts: Iterable[str]) -> str:
    """A digest of all parts of a state. Its length does not depend on the number of ranks."""
    return hashlib.sha256(" ".join(sorted(parts)).encode()).hexdigest()[:16]


def choose(on_node: Mapping[str, Iterable[Held]], nodes: Sequence[str]) -> Choice | None:
    """The newest version that is whole, with as few pieces as cover it; None if there is none.

    `on_node` has the pieces on each node, and `nodes` the node of each present rank.
    """
    ranks_on: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks_on.setdefault(node, []).append(rank)
    snapshots: dict[tuple[Version, int, str], dict[int, tuple[Parts, list[str]]]] = {}
    for node in ranks_on:
        for held in dict.fromkeys(on_node[node]):
            snapshot = snapshots.setdefault((held.piece.version, held.piece.world_size, held.whole), {})
            parts, there = snapshot.setdefault(held.piece.rank, (held.parts, []))
            if parts == held.parts:
                there.append(node)
    found = []
    for (version, world_size, whole), ranks in snapshots.items():
        cover = _cover({rank: parts for rank, (parts, _) in ranks.items()}, whole)
        if cover is not None:
            holders = {rank: tuple(sorted(h for node in ranks[rank][1] for h in ranks_on[node])) for rank in cover}
            found.append(Choice(version, world_size, holders))
    return max(found, key=lambda choice: choice.version, default=None)


def _cover(parts: dict[int, Parts], whole: str) -> list[int] | None:
    """The lowest rank, whose plain values count, and the next ranks that have parts which those before lack."""
    there: set[str] = set()
    cover: list[int] = []
    for rank in sorted(parts):
        if not cover or not parts[rank] <= there:
            cover.append(rank)
            there |= parts[rank]
    return cover if digest_of(there) == whole else None
