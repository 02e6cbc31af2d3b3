"""Chooses the snapshot of a sharded state that can be assembled from what the living nodes hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Piece:
    """One rank's part of the snapshot of (generation, step), when the job had `world_size` ranks."""

    generation: int
    step: int
    world_size: int
    rank: int


@dataclass(frozen=True)
class Choice:
    """The snapshot to load. `holders` has, for each piece by its rank, the present ranks whose node holds it."""

    generation: int
    step: int
    holders: tuple[tuple[int, ...], ...]


def choose(inventories: Sequence[Sequence[Piece]]) -> Choice | None:
    """The newest complete snapshot by (generation, step); None if there is none.

    `inventories` has, for each present rank, the whole pieces on that rank's node.
    """
    holders: dict[tuple[int, int, int], dict[int, list[int]]] = {}
    for holder, pieces in enumerate(inventories):
        for piece in sorted(set(pieces)):
            version = (piece.generation, piece.step, piece.world_size)
            holders.setdefault(version, {}).setdefault(piece.rank, []).append(holder)
    complete = [version for version, held in holders.items() if set(held) >= set(range(version[2]))]
    if not complete:
        return None
    newest = max(complete)
    generation, step, world_size = newest
    return Choice(generation, step, tuple(tuple(holders[newest][rank]) for rank in range(world_size)))


def mirrors(nodes: Sequence[str]) -> list[int | None]:
    """For each rank the rank on the next node that keeps a second copy of its piece; None if there is only one node.

    `nodes` names each rank's node. The nodes are a ring, in the order of their lowest ranks.
    """
    ring = list(dict.fromkeys(nodes))
    if len(ring) == 1:
        return [None] * len(nodes)
    ranks_of = {node: [rank for rank, each in enumerate(nodes) if each == node] for node in ring}
    found: list[int | None] = []
    for rank, node in enumerate(nodes):
        peers = ranks_of[ring[(ring.index(node) + 1) % len(ring)]]
        found.append(peers[ranks_of[node].index(rank) % len(peers)])
    return found
