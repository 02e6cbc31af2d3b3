"""Which state a new group goes on from, and who gets it from whom: pure decisions over what memories hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from elaunch.trainer.state.version import Version


@dataclass(frozen=True)
class Holding:
    """A whole copy of the replicated state, `length` bytes; equal states have equal checksums."""

    version: Version
    checksum: int
    length: int = 0


@dataclass(frozen=True)
class Record:
    """What belonged to one rank of an older group alone: its buffers and random states.

    `full` says that it has the large part too (the state of a communication hook), where there is one.
    """

    rank: int
    version: Version
    full: bool = False


@dataclass(frozen=True)
class Inventory:
    """What rank `rank` of the new group has to say of its node's memory.

    `node` tells memories apart and is empty where there is none. Only one rank a node, which `speaks`, lists what is in
    it, whole and verified, and how many bytes are free. `completed` is the newest step that any worker of the node
    completed.
    """

    rank: int
    node: str
    speaks: bool
    holdings: tuple[Holding, ...] = ()
    records: tuple[Record, ...] = ()
    completed: Version | None = None
    free: int = 0


@dataclass(frozen=True)
class Decision:
    """Where the new group goes on, and what must travel for that.

    `source` has the state in its memory; each rank of `receivers` gets it from there, into its node's memory or, those
    of `private`, into their own. `records` says whose record each new rank continues (its own rank's of the older
    group, or where that is lost the lowest one's, for the buffers only) and which rank sends or has it; `older`, whose
    own one is there of an earlier step alone, for the random state; `without_random_state` have neither. `repeated`
    counts the steps that were done and are done again. `differing` are the ranks whose node holds another state under
    the same version.
    """

    version: Version
    source: int
    receivers: tuple[int, ...] = ()
    private: tuple[int, ...] = ()
    records: dict[int, RecordSource] = field(default_factory=dict)
    older: dict[int, RecordSource] = field(default_factory=dict)
    without_random_state: tuple[int, ...] = ()
    repeated: int = 0
    differing: tuple[int, ...] = ()
    reset: bool = False


@dataclass(frozen=True)
class RecordSource:
    """A record of the older group's rank `of_rank`, in the memory that `holder`, a rank of the new one, speaks for."""

    of_rank: int
    holder: int
    version: Version


def decide(inventories: Sequence[Inventory], *, large: bool = False) -> Decision | None:
    """The newest state that can be continued, or None where no memory holds any.

    `inventories` has one of each rank of the new group. `large` says that records have a large part, without which a
    rank cannot go on exactly: then it is the newest step of which every rank's full record is there. Where no such step
    is left, or the group has another size, the newest state is taken and the large parts begin anew (`reset`).
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
    lacking = [inventory for inventory in inventories if inventory.speaks and inventory.rank not in equal]
    roomy = {inventory.node for inventory in lacking if inventory.free >= copy.length}
    cramped = {inventory.node for inventory in lacking} - roomy
    private = tuple(i.rank for i in inventories if not i.node or i.node in cramped)
    records = sources(inventories, version)
    without_own = [i.rank for i in inventories if i.rank not in records or records[i.rank].of_rank != i.rank]
    older = _older(inventories, version, without_own)
    return Decision(
        version=version,
        source=source,
        receivers=tuple(sorted([*private, *(i.rank for i in lacking if i.node in roomy)])),
        private=private,
        records=records,
        older=older,
        without_random_state=tuple(rank for rank in without_own if rank not in older),
        repeated=_repeated(inventories, version),
        differing=tuple(sorted({rank for rank, _ in held[version]} - equal)),
        reset=large and not complete,
    )


def sentence(decision: Decision) -> str:
    """What was restored, from where, and what it costs."""
    version = decision.version
    origin = f"of generation {version.generation}"
    if decision.receivers:
        origin += f"; sent to {_ranks(decision.receivers)} from rank {decision.source}"
    if decision.differing:
        origin += f"; {_ranks(decision.differing)} held a different state of that step"
    text = f"restored step {version.step} from memory ({origin}); {repeated(decision.repeated)}"
    if not decision.records:
        text += "; buffers are lost and new"
    if decision.older:
        steps = sorted({source.version.step for source in decision.older.values()})
        text += f"; the random state of {_ranks(tuple(decision.older))} is that of step {', '.join(map(str, steps))}"
    if decision.without_random_state:
        text += f"; the random state of {_ranks(decision.without_random_state)} is lost and new"
    if decision.reset:
        text += "; the state of the communication hook begins anew"
    return text


def repeated(steps: int) -> str:
    """`0 steps are repeated`, `1 step is repeated`."""
    return "1 step is repeated" if steps == 1 else f"{steps} steps are repeated"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _repeated(inventories: Sequence[Inventory], version: Version) -> int:
    completed = [inventory.completed for inventory in inventories if inventory.completed is not None]
    return max(0, max(completed).step - version.step) if completed else 0


def _all_full(inventories: Sequence[Inventory], version: Version, ranks: Sequence[int]) -> bool:
    there = {r.rank for i in inventories for r in i.records if r.version == version and r.full}
    return there == set(ranks)


def sources(inventories: Sequence[Inventory], version: Version) -> dict[int, RecordSource]:
    """For each new rank a record of that version: its own, from its own node if that has it; else the lowest rank's."""
    holders = _holders(inventories, version)
    if not holders:
        return {}
    of_rank = {i.rank: i.rank if i.rank in holders else min(holders) for i in inventories}
    return {
        rank: RecordSource(its, _nearest(inventories, rank, holders[its]), version) for rank, its in of_rank.items()
    }


def _older(inventories: Sequence[Inventory], version: Version, ranks: Sequence[int]) -> dict[int, RecordSource]:
    """Of each of `ranks` its own newest record from before `version`, if there is one of that generation.

    In an earlier one the rank may have been another's, in a group of another size.
    """
    first = Version(version.generation, 0)
    earlier = [r for i in inventories for r in i.records if first <= r.version < version]
    found = {}
    for rank in ranks:
        if versions := [record.version for record in earlier if record.rank == rank]:
            newest = max(versions)
            found[rank] = RecordSource(rank, _nearest(inventories, rank, _holders(inventories, newest)[rank]), newest)
    return found


def _holders(inventories: Sequence[Inventory], version: Version) -> dict[int, list[int]]:
    """By the record's rank, which ranks' memories have one of that version."""
    holders: dict[int, list[int]] = {}
    for inventory in inventories:
        for record in inventory.records:
            if record.version == version:
                holders.setdefault(record.rank, []).append(inventory.rank)
    return holders


def _nearest(inventories: Sequence[Inventory], rank: int, holders: Sequence[int]) -> int:
    node_of = {inventory.rank: inventory.node for inventory in inventories}
    return min([holder for holder in holders if node_of[holder] == node_of[rank]] or holders)
