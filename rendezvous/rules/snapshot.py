"""A job's keys in the store, and the state that they hold at one revision.

Keys begin with `<prefix><run_id>/`. Generations are padded to ten digits: else `table/10` would sort before `table/9`.
"""

from __future__ import annotations

import json
import re
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple
from urllib.parse import quote

from elaunch.rendezvous.codec import Name, build, decode, shown_text
from elaunch.rendezvous.endpoint import PREFIX
from elaunch.rendezvous.format import plain
from elaunch.rendezvous.rules.hang_verdict import Hang, IdleNode
from elaunch.rendezvous.rules.queries import Query, read_query
from elaunch.rendezvous.store import Absent, Delete, KeyEntry, Op, Put, TxnGuard, Unchanged, View
from elaunch.rendezvous.types import (
    GENERATION_DIGITS,
    SLOTS_MAX,
    Failure,
    Generation,
    Joined,
    Node,
    Outcome,
    RankTable,
    Seat,
    Terms,
)
from elaunch.strict_json import parse_json

_RECORDS: dict[str, Any] = {
    "members": Node,
    "joined": Joined,
    "failures": Failure,
    "still": IdleNode,
    "generation": Generation,
    "ended": Outcome,
    "hang": Hang,
}
_LEADER, _SPEC, _QUERY = ["ctl", "leader"], ["ctl", "spec"], ["ctl", "question"]
_OF_NODES = ("joined", "failures", "done", "still")
# The most sentences about unreadable records in one snapshot: there may be thousands.
_SENTENCES_MAX = 8
# Characters of a key in such a sentence.
_SHOWN = 200


class Keys:
    """The names of one job's keys. `prefix` starts and ends with a slash.

    Every node watches `control`, the leader `root`. `query` is a query to all nodes, `hang` the leader's verdict.
    """

    def __init__(self, run_id: str, prefix: str = PREFIX) -> None:
        self.run_id = run_id
        self.prefix = prefix
        # A slash in the run id would put one job's keys among those of another job.
        self.root = f"{prefix}{quote(run_id, safe='')}/"
        self.members = f"{self.root}members/"
        self.control = f"{self.root}ctl/"
        self.spec = f"{self.control}spec"
        self.generation = f"{self.control}generation"
        self.leader = f"{self.control}leader"
        self.ended = f"{self.control}ended"
        self.query = f"{self.control}question"
        self.hang = f"{self.control}hang"

    def responses(self, identity: str, node_id: str = "") -> str:
        """The key of a node's response. It belongs to no job's root: a quoted run id has no question mark."""
        return f"{self.prefix}?answers/{quote(self.run_id, safe='')}/{identity}/{node_id}"

    def member(self, node_id: str) -> str:
        return f"{self.members}{node_id}"

    def joined(self, generation: int, node_id: str = "") -> str:
        return f"{self.root}joined/{generation:010}/{node_id}"

    def failure(self, generation: int, node_id: str = "") -> str:
        return f"{self.root}failures/{generation:010}/{node_id}"

    def done(self, generation: int, node_id: str = "") -> str:
        return f"{self.root}done/{generation:010}/{node_id}"

    def still(self, generation: int, node_id: str = "") -> str:
        """The key by which this node reports that all of its ranks are idle."""
        return f"{self.root}still/{generation:010}/{node_id}"

    def table(self, generation: int) -> str:
        return f"{self.control}table/{generation:010}"


@dataclass(frozen=True)
class Snapshot:
    """The state on which decisions are based, as it was at `revision`.

    A follower's snapshot holds what is under `ctl/`. Only a `whole` snapshot has members, joined, failures (in the
    order in which they were recorded), done and still. `query` is a query to all nodes; nothing is decided from it.
    `unreadable` holds sentences about records that could not be read, each once. `repairs` is how the leader replaces
    these: the guard that one is unchanged, and the operation that restores the last readable record, or deletes it.
    """

    keys: Keys
    revision: int = 0
    whole: bool = False
    terms: Terms | None = None
    lease: int = 0
    generation: Generation | None = None
    generation_revision: int = 0
    leader: str = ""
    leader_revision: int = 0
    ended: Outcome | None = None
    members: Mapping[str, Node] = field(default_factory=dict)
    joined: Mapping[int, Mapping[str, Joined]] = field(default_factory=dict)
    failures: Mapping[int, tuple[Failure, ...]] = field(default_factory=dict)
    done: Mapping[int, frozenset[str]] = field(default_factory=dict)
    still: Mapping[int, Mapping[str, IdleNode]] = field(default_factory=dict)
    tables: Mapping[int, RankTable] = field(default_factory=dict)
    query: Query | None = None
    hang: Hang | None = None
    unreadable: tuple[str, ...] = ()
    repairs: tuple[tuple[Unchanged, Op], ...] = ()

    @property
    def table(self) -> RankTable | None:
        """The newest table, which may be an older generation's."""
        return self.tables[max(self.tables)] if self.tables else None

    @property
    def current_table(self) -> RankTable | None:
        """The newest generation's table, or None while that generation forms."""
        return self.tables.get(self.generation.number) if self.generation else None

    @property
    def gen_guard(self) -> Unchanged | Absent:
        """GEN: no generation was opened since this was read."""
        if self.generation is None:
            return Absent(self.keys.generation)
        return Unchanged(self.keys.generation, self.generation_revision)

    @property
    def live_guard(self) -> Absent:
        """LIVE: the job has not ended."""
        return Absent(self.keys.ended)

    @property
    def leader_guard(self) -> Unchanged:
        """LEADER: no other node has taken over since this was read."""
        return Unchanged(self.keys.leader, self.leader_revision)

    @property
    def node_guards(self) -> tuple[TxnGuard, ...]:
        """GEN and LIVE."""
        return self.gen_guard, self.live_guard

    @property
    def leader_guards(self) -> tuple[TxnGuard, ...]:
        """GEN, LIVE and LEADER."""
        return self.gen_guard, self.live_guard, self.leader_guard

    def put(self, key: str, value: str) -> Put:
        """Write a key that belongs to the run, not to a node: it is attached to the run's lease."""
        return Put(key, value, self.lease)


class _Known(NamedTuple):
    """An entry with the parts of its key; its record, and the entry that this was read from: None if there is none."""

    entry: KeyEntry
    parts: list[str]
    record: Any
    good: KeyEntry | None


class SnapshotReader:
    """Turns views of one job's keys into snapshots. A record that has not changed is decoded only once."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._known: dict[str, _Known] = {}

    def read(self, view: View, *, whole: bool) -> Snapshot:
        """The snapshot for `view`.

        If a record was overwritten with something unreadable, the last readable record counts; without one, the key is
        ignored: that affects the node that wrote it, not the job. Raises ValueError, with the name of the key, only for
        a record that the whole job needs.
        """
        known: dict[str, _Known] = {}
        broken: dict[str, ValueError] = {}
        unreadable: list[str] = []
        repairs: list[tuple[Unchanged, Op]] = []
        fields: dict[str, Any] = {}
        members: dict[str, Node] = {}
        tables: dict[int, RankTable] = {}
        # Records by the first part of their keys, generation and node.
        of_nodes: dict[str, dict[int, dict[str, Any]]] = {part: {} for part in _OF_NODES}
        for key, entry in view.entries.items():
            before = self._known.get(key)
            # The leader of many nodes reads often, and few entries have changed.
            if before is None or (before.entry is not entry and before.entry != entry):
                before = self._read(key, entry, before, broken, unreadable)
            known[key] = before
            last, parts, record, good = before
            # A query's key on no lease would never be deleted, and would block all queries.
            is_broken = good is not last or (record is None and not last.lease)
            if is_broken and parts != _LEADER:
                restored = Put(key, good.value, good.lease) if good is not last and good else Delete(key)
                repairs.append((Unchanged(key, last.mod_revision), restored))
            match parts:
                case ["ctl", "leader"]:
                    # If the leader's name cannot be read, any node may become leader.
                    fields |= {"leader": record or "", "leader_revision": entry.mod_revision}
                case _ if record is None:
                    pass
                case ["members", node_id]:
                    members[node_id] = record
                case ["joined" | "failures" | "done" | "still" as part, generation, node_id]:
                    of_nodes[part].setdefault(int(generation), {})[node_id] = record
                case ["ctl", "table", generation]:
                    tables[int(generation)] = record
                case ["ctl", "spec"]:
                    # A foreign overwrite is not on the run's lease.
                    fields |= {"terms": record, "lease": good.lease if good else 0}
                case ["ctl", "generation"]:
                    fields |= {"generation": record, "generation_revision": entry.mod_revision}
                case ["ctl", "question"]:
                    fields["query"] = record
                case ["ctl", "ended" | "hang" as name]:
                    fields[name] = record
        self._known = known
        for key, error in broken.items():
            if known[key].record is None and _is_needed(known[key].parts, fields.get("generation"), tables):
                lost = "so the job's state is unknown; if no elaunch of it is running, delete that key"
                raise ValueError(f"{_unreadable_text(key, error)}, {lost}") from error

        def created(generation: int, node_id: str) -> int:
            return view.entries[self._keys.failure(generation, node_id)].create_revision

        return Snapshot(
            keys=self._keys,
            revision=view.revision,
            whole=whole,
            members=members,
            joined=of_nodes["joined"],
            failures={
                g: tuple(nodes[node_id] for node_id in sorted(nodes, key=partial(created, g)))
                for g, nodes in of_nodes["failures"].items()
            },
            done={g: frozenset(nodes) for g, nodes in of_nodes["done"].items()},
            still=of_nodes["still"],
            tables=tables,
            unreadable=tuple(unreadable[:_SENTENCES_MAX]),
            repairs=tuple(repairs),
            **fields,
        )

    def _read(
        self, key: str, entry: KeyEntry, before: _Known | None, broken: dict[str, ValueError], unreadable: list[str]
    ) -> _Known:
        parts = key[len(self._keys.root) :].split("/")
        try:
            if parts == _LEADER and not entry.lease:
                raise ValueError(f"on no lease, so no elaunch wrote it: {shown_text(entry.value)!r}")
            record = _decoded(parts, entry.value)
            if parts == _QUERY and record and record.lease != entry.lease:
                # It would not be deleted with its client, and would block all other queries.
                raise ValueError(f"not on its client's lease, so no elaunch wrote it: {shown_text(entry.value)!r}")
            if before and before.good:
                _check_successor(parts, before.good, before.record, entry, record)
            return _Known(entry, parts, record, entry)
        except ValueError as error:
            broken[key] = error
            # Reported once, since such a record may be written again and again.
            if before is None or before.good is before.entry:
                unreadable.append(_unreadable_text(key, error))
            # No earlier record counts: a leader without its key no longer leads, and no client waits for a response.
            if before is None or parts in (_LEADER, _QUERY):
                return _Known(entry, parts, None, None)
            return _Known(entry, parts, before.record, before.good)


def _unreadable_text(key: str, error: ValueError) -> str:
    return f"{plain(key[:_SHOWN])} in the store is {error}"


def _is_needed(parts: list[str], generation: Generation | None, tables: Mapping[int, RankTable]) -> bool:
    """Whether the job cannot continue without this record."""
    match parts:
        case ["ctl", "spec" | "generation" | "ended"]:
            return True
        case ["ctl", "table", digits] if generation and _is_generation(digits):
            # The ranks that run, or must have exited before others run.
            return max(tables, default=-1) < int(digits) <= generation.number
    return False


def _check_successor(parts: list[str], last: KeyEntry, record: Any, entry: KeyEntry, newer: Any) -> None:
    """Raises ValueError for a readable record that no agent would write over the last one."""
    if parts == _SPEC and last.lease and not entry.lease:
        # Any JSON object is read as terms: all of their fields have defaults.
        raise ValueError(f"on no lease, so no elaunch wrote it: {shown_text(entry.value)!r}")
    is_over = last.create_revision == entry.create_revision
    if parts == ["ctl", "generation"] and is_over and newer.number < record.number:
        raise ValueError(f"that of generation {newer.number}, after generation {record.number}")


def _is_generation(digits: str) -> bool:
    """Whether `digits` is a generation as `Keys` writes it into a key."""
    return re.fullmatch(rf"[0-9]{{{GENERATION_DIGITS}}}", digits) is not None


def _decoded(parts: list[str], text: str) -> Any:
    """The record in a key's value. Raises ValueError if it is invalid, or belongs to another key."""
    match parts:
        case ["joined" | "failures" | "done" | "still", number, _] | ["ctl", "table", number] if not _is_generation(
            number
        ):
            raise ValueError(f"not a generation's: {number[:40]!r} is not a number of {GENERATION_DIGITS} digits")
        case ["members", node_id] | ["joined" | "still", _, node_id]:
            record = decode(_RECORDS[parts[0]], text)
            if record.node_id != node_id:
                raise ValueError(f"not that of {node_id[:40]!r}: it names {record.node_id[:40]!r}")
            return record
        case ["ctl", "table", generation]:
            table = decode_table(text)
            if table.generation != int(generation):
                raise ValueError(f"not that of generation {int(generation)}: it names {table.generation}")
            return table
        case ["ctl", "spec"]:
            terms = decode(Terms, text)
            if terms.nodes_max < terms.nodes_min:
                raise ValueError(f"not a Terms: {shown_text(text)!r} (nodes_max is below nodes_min)")
            return terms
        case ["failures" as name, _, _] | ["ctl", "generation" | "ended" | "hang" as name]:
            return decode(_RECORDS[name], text)
        case ["ctl", "leader"]:
            Name().check(text)
        case ["ctl", "question"]:
            return read_query(text)
    return text


# Above this size it takes longer to send a table to every node than to compress it once.
_LARGE = 4000
_PACKED = "zlib:"
# A thousand bytes for each of 16,000 nodes. Without a limit, a few kilobytes could decompress to gigabytes.
UNPACKED_BYTES_MAX = 16 << 20


def encode_table(table: RankTable) -> str:
    """JSON with the seats as three lists: nodes, slots and roles. First ranks follow from the slots.

    The table of a large job is compressed: `zlib:` and then base64, about 11 bytes a node.
    """
    # Most tables have no streak, no exclusion and no mismatch.
    record = {name: value for name, value in asdict(replace(table, seats=())).items() if value not in (None, (), "")}
    record["nodes"] = [seat.node_id for seat in table.seats]
    record["slots"] = [seat.slots for seat in table.seats]
    record["roles"] = [seat.role for seat in table.seats]
    text = json.dumps(record, separators=(",", ":"))
    return text if len(text) < _LARGE else _PACKED + b64encode(zlib.compress(text.encode())).decode()


def decode_table(text: str) -> RankTable:
    """The table that `encode_table` wrote. Raises ValueError if the text is no table."""
    try:
        record = parse_json(_unpacked(text) if text.startswith(_PACKED) else text)
        nodes = [*zip(*(record.pop(name) for name in ("nodes", "slots", "roles")), strict=True)]
        if not all(map(_is_seat, nodes)):
            raise TypeError("a seat is not a name, a number of slots and a role")
        node_ids = [node_id for node_id, _, _ in nodes]
        if len(set(node_ids)) < len(node_ids):
            raise ValueError("a node has two seats")
        # All names in one check: every agent reads the names of all nodes.
        Name().check("".join(node_ids) or "none")
        table: RankTable = build(RankTable, {"master_addr": "", "reason": "", **record, "seats": []})
        return replace(table, seats=seats_of(nodes))
    except (AttributeError, KeyError, TypeError, ValueError, zlib.error) as error:
        raise ValueError(f"not a rank table: {shown_text(text)!r} ({shown_text(str(error))})") from error


def seats_of(nodes: list[tuple[str, int, str]]) -> tuple[Seat, ...]:
    """Seats for (node id, slots, role) in rank order: ranks 0 … n - 1 without gaps."""
    # `first_ranks` has one item more than nodes: the sum of all slots.
    first_ranks = accumulate((slots for _, slots, _ in nodes), initial=0)
    return tuple(
        Seat(node_id, slots, first, role) for (node_id, slots, role), first in zip(nodes, first_ranks, strict=False)
    )


def _unpacked(text: str) -> bytes:
    unpacking = zlib.decompressobj()
    found = unpacking.decompress(b64decode(text.removeprefix(_PACKED)), UNPACKED_BYTES_MAX)
    if not unpacking.eof:
        raise ValueError(f"it is cut off, or has more than {UNPACKED_BYTES_MAX} bytes unpacked")
    return found


def _is_seat(seat: tuple[Any, Any, Any]) -> bool:
    node_id, slots, role = seat
    return type(node_id) is str and type(slots) is int and 1 <= slots <= SLOTS_MAX and type(role) is str
