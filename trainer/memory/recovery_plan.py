"""Decides from which state a new group continues, and which rank sends it to which. Pure.

A sharded state consists of *parts*: sets of boxes of its tensors. Ranks that hold the same boxes hold the same part, as
the replicas of HSDP do. Each piece lists the parts that it holds, and has the digest of all parts of the state. So the
pieces of all ranks are not needed, but all parts are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elaunch.trainer.state import Piece, Version

# Ranks named in a sentence.
_NAMED_MAX = 16

Parts = frozenset[str]


@dataclass(frozen=True)
class Held:
    """A verified piece in a node's memory: its `parts` by their digests, and `whole`, the digest of all the state's."""

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


@dataclass(frozen=True)
class Holding:
    """A whole copy of the replicated state, of `length` bytes. Equal states have equal checksums."""

    version: Version
    checksum: int
    length: int = 0


@dataclass(frozen=True)
class Record:
    """The own state of one rank of an older group: its buffers and random states.

    `full`: it also has the large part, if there is one (the state of a communication hook).
    """

    rank: int
    version: Version
    full: bool = False


@dataclass(frozen=True)
class Inventory:
    """The report of rank `rank` of the new group about its node's memory.

    `node` identifies the memory; it is empty without one. Only one rank of each node `reports`: it lists the whole,
    verified copies and the free bytes. `completed` is the newest step that any worker of the node has completed.
    """

    rank: int
    node: str
    reports: bool
    holdings: tuple[Holding, ...] = ()
    records: tuple[Record, ...] = ()
    completed: Version | None = None
    free: int = 0


@dataclass(frozen=True)
class Decision:
    """From which version the new group continues, and what must be sent for that.

    Rank `source` has a replicated state in its memory. Each rank of `receivers` gets it from there: into its node's
    memory, or into its own if it is in `private`. `choice` has the pieces of a sharded state to load. `records`
    holds, for each new rank, the record that it continues, and the rank that sends or has it: the record of the same
    rank in the older group or, if that is lost, of the lowest rank (then only its buffers are used). `older` holds
    ranks whose own record exists only for an earlier step; its random state is used. `without_random_state` are the
    ranks without either. `repeated` counts completed steps that are repeated. `reset`: the large parts of
    records start over.
    """

    version: Version
    source: int = -1
    receivers: tuple[int, ...] = ()
    private: tuple[int, ...] = ()
    records: dict[int, RecordSource] = field(default_factory=dict)
    older: dict[int, RecordSource] = field(default_factory=dict)
    without_random_state: tuple[int, ...] = ()
    repeated: int = 0
    reset: bool = False
    choice: Choice | None = None


@dataclass(frozen=True)
class RecordSource:
    """Where a record of the older group's rank `of_rank` is: in the memory of new rank `holder`'s node."""

    of_rank: int
    holder: int
    version: Version


def decide(inventories: Sequence[Inventory], *, large: bool = False) -> Decision | None:
    """The newest state that can be continued, or None if no memory holds one.

    `inventories` has one entry for each rank of the new group.
    `large`: records have a large part, without which a rank cannot continue exactly. Then the newest step is
    taken for which every rank's full record exists. If no such step is left, or the group has another size, the newest
    state is taken and the large parts start over (`reset`).
    """
    held: dict[Version, list[tuple[int, Holding]]] = {}
    for inventory in inventories:
        for holding in inventory.holdings:
            held.setdefault(holding.version, []).append((inventory.rank, holding))
    if not held:
        return None
    wanted = range(len(inventories))
    complete = [version for version in held if _all_full(inventories, version, wanted)] if large else []
    version = max(complete or held)
    source, copy = min(held[version], key=lambda pair: pair[0])
    equal = {rank for rank, other in held[version] if other.checksum == copy.checksum}
    lacking = [inventory for inventory in inventories if inventory.reports and inventory.rank not in equal]
    roomy = {inventory.node for inventory in lacking if inventory.free >= copy.length}
    cramped = {inventory.node for inventory in lacking} - roomy
    private = tuple(i.rank for i in inventories if not i.node or i.node in cramped)
    return _decision(
        inventories,
        version,
        source=source,
        receivers=tuple(sorted([*private, *(i.rank for i in lacking if i.node in roomy)])),
        private=private,
        reset=large and not complete,
    )


def decide_in_parts(inventories: Sequence[Inventory], choice: Choice | None) -> Decision | None:
    """The decision for a sharded state, of which `choice` is the newest complete snapshot."""
    return None if choice is None else _decision(inventories, choice.version, choice=choice)


def _decision(inventories: Sequence[Inventory], version: Version, **state: Any) -> Decision:
    """The decision for `version`, whose `state` is given, with what each rank has for itself."""
    there = _Records(inventories)
    records = there.sources(version)
    without_own = [i.rank for i in inventories if i.rank not in records or records[i.rank].of_rank != i.rank]
    older = there.older(version, without_own)
    return Decision(
        version=version,
        records=records,
        older=older,
        without_random_state=tuple(rank for rank in without_own if rank not in older),
        repeated=_repeated(inventories, version),
        **state,
    )


def sentence(decision: Decision) -> str:
    """One sentence: the restored state, its source, and how many steps are repeated."""
    version = decision.version
    origin = f"of generation {version.generation}{', in parts' if decision.choice else ''}"
    if decision.receivers:
        origin += f"; sent to {_ranks(decision.receivers)} from rank {decision.source}"
    text = f"restored step {version.step} from memory ({origin}); {repeated(decision.repeated)}"
    if not decision.records:
        text += "; buffers are lost and reinitialized"
    if decision.older:
        steps = sorted({source.version.step for source in decision.older.values()})
        text += f"; the random state of {_ranks(tuple(decision.older))} is that of step {', '.join(map(str, steps))}"
    if decision.without_random_state:
        text += f"; the random state of {_ranks(decision.without_random_state)} is lost and reinitialized"
    if decision.reset:
        text += "; the communication hook starts with a new state"
    return text


def repeated(steps: int) -> str:
    """How many steps are repeated, and why."""
    if steps == 0:
        return "0 steps are repeated"
    return f"{'1 step is' if steps == 1 else f'{steps} steps are'} repeated, since no newer state outlived the workers"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _NAMED_MAX} more" if len(ranks) > _NAMED_MAX else ""
    return f"ranks {', '.join(map(str, ranks[:_NAMED_MAX]))}{more}"


def _repeated(inventories: Sequence[Inventory], version: Version) -> int:
    completed = [inventory.completed for inventory in inventories if inventory.completed is not None]
    return max(0, max(completed).step - version.step) if completed else 0


def _all_full(inventories: Sequence[Inventory], version: Version, ranks: Sequence[int]) -> bool:
    there = {r.rank for i in inventories for r in i.records if r.version == version and r.full}
    return there == set(ranks)


class _Records:
    """An index of the records of all ranks by version, and of where they are."""

    def __init__(self, inventories: Sequence[Inventory]) -> None:
        self._node_of = {inventory.rank: inventory.node for inventory in inventories}
        # For each version and rank: the ranks whose node's memory holds that record.
        self._holders: dict[Version, dict[int, list[int]]] = {}
        for inventory in inventories:
            for record in inventory.records:
                self._holders.setdefault(record.version, {}).setdefault(record.rank, []).append(inventory.rank)

    def sources(self, version: Version) -> dict[int, RecordSource]:
        """For each new rank a record of that version: its own, if possible from its own node, or the lowest rank's."""
        there = self._holders.get(version, {})
        if not there:
            return {}
        lowest = min(there)
        return {rank: self._source(rank, rank if rank in there else lowest, version) for rank in self._node_of}

    def older(self, version: Version, ranks: Sequence[int]) -> dict[int, RecordSource]:
        """For each of `ranks` its own newest record before `version`, if there is one of the same generation.

        In an earlier generation the group may have had another size, and the rank another share.
        """
        first = Version(version.generation, 0)
        newest: dict[int, Version] = {}
        for each in sorted(each for each in self._holders if first <= each < version):
            newest |= dict.fromkeys(self._holders[each], each)
        return {rank: self._source(rank, rank, newest[rank]) for rank in ranks if rank in newest}

    def _source(self, rank: int, of_rank: int, version: Version) -> RecordSource:
        """That record for `rank`: on its own node, if it is there, else in the memory of the lowest rank."""
        holders = self._holders[version][of_rank]
        near = [holder for holder in holders if self._node_of[holder] == self._node_of[rank]]
        return RecordSource(of_rank, min(near or holders), version)


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
