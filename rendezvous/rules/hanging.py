"""When a whole job hangs, and which rank to name: the leader's rule, and its transactions.

Each node writes a record while all of its ranks stand still. One node's records prove nothing: a rank of another node
may work, and the others wait for it. So the job hangs when every seated node has a record that is ready.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.rules.hang_records import Hang, StillGroup, StillKind, StillNode
from elaunch.rendezvous.rules.snapshot import Snapshot
from elaunch.rendezvous.rules.transactions import leader_guards
from elaunch.rendezvous.store import Absent, Delete, NoneNewer, Present, Txn
from elaunch.rendezvous.times import Times
from elaunch.rendezvous.types import Node, RankTable, Seat

# Who waits for a lock may wait for another rank, so those are named late; last those that could not be looked into.
_SUSPECT = (StillKind.STOPPED, StillKind.RUNS, StillKind.ELSEWHERE, StillKind.STUCK, StillKind.UNKNOWN)
_SAID_MAX = 4


@dataclass(frozen=True)
class _Place:
    """Ranks of any nodes at the same place; `seat` is the first one's, `nodes` are all of them."""

    group: StillGroup
    seat: Seat
    count: int
    ranks: tuple[str, ...]
    nodes: frozenset[str]

    @property
    def said(self) -> str:
        """Which ranks do what: "ranks 0, 2, 3 wait in all_reduce (train.py:40)"."""
        return f"{_who(self.ranks, self.count)} {_plural(self.group.does) if self.count > 1 else self.group.does}"


def confirm_s(times: Times, table: RankTable) -> float:
    """For how long the records must stand. Another node may notice late that it goes on; a node alone does not."""
    return times.hang_confirm_s if len(table.seats) > 1 else 0.0


def tell_still(snapshot: Snapshot, me: Node, generation: int, record: StillNode | None) -> Txn:
    """Write that all ranks of this node stand still; or, with None, that one goes on."""
    key = snapshot.keys.still(generation, me.node_id)
    if record is None:
        return Txn((), (Delete(key),))
    return Txn((snapshot.gen_guard, snapshot.live_guard), (snapshot.put(key, encode(record)),))


def end_hang(snapshot: Snapshot, table: RankTable, done: frozenset[str]) -> Txn | None:
    """Take the verdict back if a node no longer stands still; None if there is nothing to take back."""
    hang, records = snapshot.hang, snapshot.still.get(table.generation, {})
    is_over = any(seat.node_id not in records and seat.node_id not in done for seat in table.seats)
    if hang is None or hang.generation != table.generation or not is_over:
        return None
    return Txn(leader_guards(snapshot), (Delete(snapshot.keys.hang),))


def new_hang(
    snapshot: Snapshot, table: RankTable, done: frozenset[str], stood_s: float, *, has_limit: bool
) -> Hang | None:
    """The verdict, if the job hangs and there is none yet. The records have stood for `stood_s`."""
    if snapshot.hang is not None and snapshot.hang.generation == table.generation:
        return None
    return verdict_on(snapshot.still.get(table.generation, {}), table, done, stood_s, has_limit=has_limit)


def declare_hang(snapshot: Snapshot, table: RankTable, hang: Hang) -> Txn:
    """Write the verdict. It fails if a node has changed what it says, or if the named one goes on."""
    keys = snapshot.keys
    guards = (
        *leader_guards(snapshot),
        Absent(keys.hang),
        Present(keys.table(table.generation)),
        NoneNewer(keys.still(table.generation), snapshot.revision),
        Present(keys.still(table.generation, hang.node_id)),
    )
    return Txn(guards, (snapshot.put(keys.hang, encode(hang)),))


def verdict_on(
    records: Mapping[str, StillNode],
    table: RankTable,
    done: frozenset[str],
    stood_s: float = 0.0,
    *,
    has_limit: bool = False,
) -> Hang | None:
    """The verdict, or None while somebody works or may go on by itself.

    Ranks none of which waits for another hang only if the user gave a limit: `has_limit`.
    """
    seats = [seat for seat in table.seats if seat.node_id not in done]
    if not seats or any(seat.node_id not in records or not records[seat.node_id].is_ready for seat in seats):
        return None
    places = sorted(_places(seats, records), key=lambda place: place.count)
    waiting = [place for place in reversed(places) if place.group.kind is StillKind.WAITS]
    others = [place for kind in _SUSPECT for place in places if place.group.kind is kind]
    exited = _exited(table, seats, records, done)
    if not places or not (has_limit or waiting or exited or _is_stuck_at_all(places, table)):
        return None
    still_s = min(records[seat.node_id].still_s for seat in seats) + stood_s
    left = sum(place.count for place in places)
    if not waiting and _are_unreadable(places) and left > 1:
        all_ = f"hung: all {left} ranks {_plural(places[-1].group.does)}, for {still_s:.0f} s,"
        return Hang(table.generation, seats[0].node_id, -1, all_, is_blameless=True)
    if others:
        is_blameless = not _points_at_node(others, waiting)
        hang = _hang(table, others[0], [*waiting, *others[1:]], still_s, is_blameless=is_blameless)
        if waiting or not exited:
            return hang
        return replace(hang, message=f"{hang.message.removesuffix(',')}, after {exited.words},", is_unawaited=True)
    if exited:
        message = f"{exited.said}, while {_all_said(waiting)}, for {still_s:.0f} s,"
        return Hang(table.generation, exited.seat.node_id, exited.rank, message, is_blameless=True)
    if len(waiting) > 1:
        # The fewest are named. Of two alike, neither is right by number: the message has both.
        is_tie = waiting[-1].count == waiting[-2].count
        is_blameless = is_tie or len(waiting[-1].nodes) > 1
        return _hang(table, waiting[-1], waiting[:-1], still_s, is_blameless=is_blameless)
    (only,) = waiting
    everybody = only.said if only.count == 1 else f"all {only.count} ranks {_plural(only.group.does)}"
    message = (
        f"hung: {everybody} for {still_s:.0f} s and no rank is anywhere else (a rank may have called it once more or"
        " less than the others, or the network between them fails),"
    )
    return Hang(table.generation, seats[0].node_id, -1, message, is_blameless=True)


def _points_at_node(others: Sequence[_Place], waiting: Sequence[_Place]) -> bool:
    """Whether the first of `others` is named for what it does, and not because one had to be named."""
    kind = others[0].group.kind
    if kind is StillKind.UNKNOWN or not (waiting or kind is StillKind.STOPPED):
        return False
    return len(frozenset[str]().union(*(place.nodes for place in others if place.group.kind is kind))) == 1


def _places(seats: Sequence[Seat], records: Mapping[str, StillNode]) -> list[_Place]:
    """All groups of all nodes, those at the same place as one."""
    found: dict[object, _Place] = {}
    for seat in seats:
        for group in records[seat.node_id].groups:
            key = (group.kind, group.where, group.does)
            known = found.get(key, _Place(group, seat, 0, (), frozenset()))
            found[key] = _Place(
                known.group,
                known.seat,
                known.count + group.count,
                (*known.ranks, group.ranks),
                known.nodes | {seat.node_id},
            )
    return list(found.values())


def _is_stuck_at_all(places: Sequence[_Place], table: RankTable) -> bool:
    """Whether it is a hang though no rank waits in a collective.

    Programs that have nothing to do with each other, such as servers, stand still at one place each. They do not hang.
    """
    if _are_unreadable(places):
        # It is known only that no rank does anything.
        return table.world_size > 1
    return any(place.group.kind is StillKind.STUCK for place in places) and len(places) > 1


def _are_unreadable(places: Sequence[_Place]) -> bool:
    return all(place.group.kind is StillKind.UNKNOWN for place in places)


@dataclass(frozen=True)
class _Exited:
    """Ranks that ended while others wait: the node that says so, a rank (-1 for none), and how it is said of it."""

    seat: Seat
    rank: int
    said: str
    words: str


def _exited(
    table: RankTable, seats: Sequence[Seat], records: Mapping[str, StillNode], done: frozenset[str]
) -> _Exited | None:
    for seat in seats:
        if (record := records[seat.node_id]).exited:
            is_one = record.exited == f"rank {record.exited_rank}"
            how = "reached the end of the program" if record.is_lingering else "exited with code 0"
            said = how if is_one else f"and others ({record.exited}) {how}"
            return _Exited(seat, record.exited_rank, said, f"{record.exited} {how}")
    gone = [seat for seat in table.seats if seat.node_id in done]
    if not gone:
        return None
    # A node that is done has no worker that could fail: a node that waits says it.
    words = (
        f"{f'rank {gone[0].first_rank}' if gone[0].slots == 1 else 'all ranks'} of {gone[0].host} exited with code 0"
    )
    return _Exited(seats[0], -1, f"hung: {words}", words)


def _hang(table: RankTable, suspect: _Place, rest: Sequence[_Place], still_s: float, *, is_blameless: bool) -> Hang:
    """The sentence begins with the suspect's first rank."""
    also = f" (as {'does' if suspect.count == 2 else 'do'} {suspect.count - 1} more)" if suspect.count > 1 else ""
    others = f", while {_all_said(rest)}" if rest else ""
    message = f"hung: it {suspect.group.does}{also}{others}, for {still_s:.0f} s,"
    group = suspect.group
    return Hang(table.generation, suspect.seat.node_id, group.first_rank, message, is_blameless, pid=group.pid)


def _all_said(places: Sequence[_Place]) -> str:
    left = len(places) - _SAID_MAX
    more = f", and {left} more {'group is' if left == 1 else 'groups are'} elsewhere" if left > 0 else ""
    return ", ".join(place.said for place in places[:_SAID_MAX]) + more


def _who(ranks: Sequence[str], count: int) -> str:
    numbers = [text.removeprefix("ranks ").removeprefix("rank ") for text in ranks]
    if len(numbers) > _SAID_MAX:
        return f"ranks {', '.join(numbers[:_SAID_MAX])}, … ({count} ranks)"
    return f"{'rank' if count == 1 else 'ranks'} {', '.join(numbers)}"


def _plural(does: str) -> str:
    """What several ranks do: "waits in …" becomes "wait in …"."""
    verb, blank, more = does.partition(" ")
    plural = {"is": "are", "shows": "show", "uses": "use"}.get(verb, verb.removesuffix("s"))
    return f"{plural}{blank}{more}"
