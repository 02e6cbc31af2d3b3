"""Hang detection for a whole job: the nodes' records, the leader's verdict with the rank to name, its transactions.

Each node writes a record while all of its ranks are idle. One node's records prove nothing: a rank of another node may
be working while the others wait for it. So the job hangs when every seated node has a record that is ready.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Annotated

from elaunch.rendezvous.codec import Between, Bounded, encode, keep_line
from elaunch.rendezvous.store import Absent, Delete, NoneNewer, Present, Txn
from elaunch.rendezvous.times import Times
from elaunch.rendezvous.types import GENERATION_MAX, Node, RankTable, Seat

if TYPE_CHECKING:
    from elaunch.rendezvous.rules.snapshot import Snapshot

# Twice the time between two samples of a worker.
HANG_CONFIRM_S = 10.0
# A node's ranks are at a few places. More groups than this are not worth a larger record.
GROUPS_MAX = 8
_RANK_MAX = (1 << 31) - 1

_Text = Annotated[str, keep_line(400)]
_Id = Annotated[str, keep_line(300)]
# -1 for none.
_Rank = Annotated[int, Between(-1, _RANK_MAX)]


class IdleReason(Enum):
    """Why a rank is idle, as far as its node knows."""

    WAITS = "waits"  # In a call that only other ranks can end.
    STOPPED = "stopped"  # By a signal.
    RUNS = "runs"  # In a loop or a C function that does nothing else and holds the GIL.
    STUCK = "stuck"  # It waits for a lock or for a data loader, and no thread or child of it does anything.
    ELSEWHERE = "elsewhere"  # It may continue without others: a file, the network, a sleep.
    UNKNOWN = "unknown"  # It uses no CPU, and its stack cannot be read.


@dataclass(frozen=True)
class IdleGroup(Bounded):
    """Ranks of one node that are idle at the same place; `pid` is the process of `first_rank`.

    `ranks` names them ("ranks 0, 2–3"), `count` is their number. `where` is the place, equal on all nodes for ranks at
    the same place. `does` is what they do, as the middle of a sentence.
    """

    kind: IdleReason
    first_rank: Annotated[int, Between(0, _RANK_MAX)]
    count: Annotated[int, Between(1, _RANK_MAX)]
    ranks: _Text
    where: _Text
    does: _Text
    pid: int = -1


@dataclass(frozen=True)
class IdleNode(Bounded):
    """All ranks of a node are idle, for `still_s` when the record was written.

    `is_ready`: this is long enough for what they do. `exited` names ranks of this node that have exited with 0 before;
    empty if there are none, and then `exited_rank` is -1. `is_lingering`: the processes of some of these still exist,
    after the end of their programs.
    """

    node_id: _Id
    still_s: Annotated[float, Between(0, 1e9)]
    is_ready: bool
    groups: tuple[IdleGroup, ...]
    exited: _Text = ""
    exited_rank: _Rank = -1
    is_lingering: bool = False


@dataclass(frozen=True)
class Hang(Bounded):
    """The leader's verdict: the job hangs in `generation`.

    `rank` is the rank to name, -1 where none differs from the others; `node_id` is its node, else the first node that
    is not done. `message` is the sentence about it, as in `Failure`. `is_blameless` as in `Failure`, too: a rank is
    named by order alone. `is_unawaited`: no rank waits for it, since all others have ended: that is no failure. `pid`
    is the named rank's process, -1 if that is not known.
    """

    generation: Annotated[int, Between(0, GENERATION_MAX)]
    node_id: _Id
    rank: _Rank
    message: Annotated[str, keep_line(2 << 10)]
    is_blameless: bool = False
    is_unawaited: bool = False
    pid: int = -1

    @property
    def summary(self) -> str:
        """The message without the parts that join it to a failure's sentence."""
        return self.message.removeprefix("hung: ").rstrip(",")


def hang_sentence(hang: Hang, host: str) -> str:
    """The verdict as a sentence that begins with the rank it names, on `host`."""
    if hang.rank < 0:
        return hang.summary
    where = f"(pid {hang.pid} on {host})" if hang.pid > 0 else f"on {host}"
    return f"rank {hang.rank} {where} {hang.summary.removeprefix('it ')}"


# In this order: a rank that waits for a lock may wait for another rank. Those that cannot be inspected come last.
_SUSPECT = (IdleReason.STOPPED, IdleReason.RUNS, IdleReason.ELSEWHERE, IdleReason.STUCK, IdleReason.UNKNOWN)
_NAMED_MAX = 4


@dataclass(frozen=True)
class _Place:
    """Ranks of any nodes at the same place; `seat` is that of the first, `nodes` are the ids of all their nodes."""

    group: IdleGroup
    seat: Seat
    count: int
    ranks: tuple[str, ...]
    nodes: frozenset[str]

    @property
    def text(self) -> str:
        """Which ranks do what: "ranks 0, 2, 3 wait in all_reduce (train.py:40)"."""
        return f"{_who(self.ranks, self.count)} {_plural(self.group.does) if self.count > 1 else self.group.does}"


def confirm_s(times: Times, table: RankTable) -> float:
    """The time for which the records must hold: another node may report late that it continues; one alone does not."""
    return min(HANG_CONFIRM_S, times.hang_after_s / 3 or HANG_CONFIRM_S) if len(table.seats) > 1 else 0.0


def report_idle(snapshot: Snapshot, me: Node, generation: int, record: IdleNode | None) -> Txn:
    """Write the record that all ranks of this node are idle; with None, delete it, since one continues."""
    key = snapshot.keys.still(generation, me.node_id)
    if record is None:
        return Txn((), (Delete(key),))
    return Txn(snapshot.node_guards, (snapshot.put(key, encode(record)),))


def end_hang(snapshot: Snapshot, table: RankTable, done: frozenset[str]) -> Txn | None:
    """Withdraw the verdict if a node is no longer idle; None if there is nothing to withdraw."""
    hang, records = snapshot.hang, snapshot.still.get(table.generation, {})
    is_over = any(seat.node_id not in records and seat.node_id not in done for seat in table.seats)
    if hang is None or hang.generation != table.generation or not is_over:
        return None
    return Txn(snapshot.leader_guards, (Delete(snapshot.keys.hang),))


def declare_hang(snapshot: Snapshot, table: RankTable, hang: Hang) -> Txn:
    """Write the verdict. It fails if a node has changed its record, or if the named one continues."""
    keys = snapshot.keys
    guards = (
        *snapshot.leader_guards,
        Absent(keys.hang),
        Present(keys.table(table.generation)),
        NoneNewer(keys.still(table.generation), snapshot.revision),
        Present(keys.still(table.generation, hang.node_id)),
    )
    return Txn(guards, (snapshot.put(keys.hang, encode(hang)),))


def verdict_on(
    records: Mapping[str, IdleNode],
    table: RankTable,
    done: frozenset[str],
    held_s: float = 0.0,
    *,
    has_limit: bool = False,
) -> Hang | None:
    """The verdict, or None while a rank works or may continue without others.

    Idle ranks that do not depend on each other hang only with `has_limit`: the user gave a limit.
    """
    seats = [seat for seat in table.seats if seat.node_id not in done]
    if not seats or any(seat.node_id not in records or not records[seat.node_id].is_ready for seat in seats):
        return None
    places = sorted(_places(seats, records), key=lambda place: place.count)
    waiting = [place for place in reversed(places) if place.group.kind is IdleReason.WAITS]
    others = [place for kind in _SUSPECT for place in places if place.group.kind is kind]
    exited = _exited(table, seats, records, done)
    are_unreadable = all(place.group.kind is IdleReason.UNKNOWN for place in places)
    # Programs that are independent of each other, such as servers, are all idle at the same place: no hang.
    is_stuck = any(place.group.kind is IdleReason.STUCK for place in places) and len(places) > 1
    is_hang = has_limit or waiting or exited or is_stuck or (are_unreadable and table.world_size > 1)
    if not places or not is_hang:
        return None
    still_s = min(records[seat.node_id].still_s for seat in seats) + held_s
    left = sum(place.count for place in places)
    if are_unreadable and left > 1:
        all_ = f"hung: all {left} ranks {_plural(places[-1].group.does)}, for {still_s:.0f} s,"
        return Hang(table.generation, seats[0].node_id, -1, all_, is_blameless=True)
    if others:
        is_blameless = not _points_at_node(others, waiting)
        hang = _hang(table, others[0], [*waiting, *others[1:]], still_s, is_blameless=is_blameless)
        if waiting or not exited:
            return hang
        return replace(hang, message=f"{hang.message.removesuffix(',')}, after {exited.text},", is_unawaited=True)
    if exited:
        message = f"{exited.message}, while {_listed(waiting)}, for {still_s:.0f} s,"
        return Hang(table.generation, exited.seat.node_id, exited.rank, message, is_blameless=True)
    if len(waiting) > 1:
        # The smallest group is named. Of two equal ones either may be the cause: the message has both.
        is_tie = waiting[-1].count == waiting[-2].count
        is_blameless = is_tie or len(waiting[-1].nodes) > 1
        return _hang(table, waiting[-1], waiting[:-1], still_s, is_blameless=is_blameless)
    (only,) = waiting
    everybody = only.text if only.count == 1 else f"all {only.count} ranks {_plural(only.group.does)}"
    message = (
        f"hung: {everybody} for {still_s:.0f} s and no rank is anywhere else (a rank may have called it once more or"
        " less than the others, or the network between them fails),"
    )
    return Hang(table.generation, seats[0].node_id, -1, message, is_blameless=True)


def _points_at_node(others: Sequence[_Place], waiting: Sequence[_Place]) -> bool:
    """Whether the first of `others` is named for what it does, and not because one had to be named."""
    kind = others[0].group.kind
    if kind is IdleReason.UNKNOWN or not (waiting or kind is IdleReason.STOPPED):
        return False
    return len(frozenset[str]().union(*(place.nodes for place in others if place.group.kind is kind))) == 1


def _places(seats: Sequence[Seat], records: Mapping[str, IdleNode]) -> list[_Place]:
    """The groups of all nodes, merged by place."""
    found: dict[object, _Place] = {}
    for seat in seats:
        for group in records[seat.node_id].groups:
            key = (group.kind, group.where, group.does)
            known = found.get(key, _Place(group, seat, 0, (), frozenset()))
            count, ranks = known.count + group.count, (*known.ranks, group.ranks)
            found[key] = _Place(known.group, known.seat, count, ranks, known.nodes | {seat.node_id})
    return list(found.values())


@dataclass(frozen=True)
class _Exited:
    """Ranks that ended while others wait: the node that reports it, a rank (-1 for none), and how they ended.

    `message` begins the sentence of the verdict about `rank`; `text` names the ranks itself.
    """

    seat: Seat
    rank: int
    message: str
    text: str


def _exited(
    table: RankTable, seats: Sequence[Seat], records: Mapping[str, IdleNode], done: frozenset[str]
) -> _Exited | None:
    for seat in seats:
        if (record := records[seat.node_id]).exited:
            is_one = record.exited == f"rank {record.exited_rank}"
            how = "reached the end of the program" if record.is_lingering else "exited with code 0"
            message = how if is_one else f"and others ({record.exited}) {how}"
            return _Exited(seat, record.exited_rank, message, f"{record.exited} {how}")
    gone = [seat for seat in table.seats if seat.node_id in done]
    if not gone:
        return None
    # A node that is done has no worker that could fail: a node that waits reports it.
    ranks = f"rank {gone[0].first_rank}" if gone[0].slots == 1 else "all ranks"
    text = f"{ranks} of {gone[0].host} exited with code 0"
    return _Exited(seats[0], -1, f"hung: {text}", text)


def _hang(table: RankTable, suspect: _Place, rest: Sequence[_Place], still_s: float, *, is_blameless: bool) -> Hang:
    """The verdict that names the suspect's first rank."""
    also = f" (as {'does' if suspect.count == 2 else 'do'} {suspect.count - 1} more)" if suspect.count > 1 else ""
    others = f", while {_listed(rest)}" if rest else ""
    message = f"hung: it {suspect.group.does}{also}{others}, for {still_s:.0f} s,"
    group = suspect.group
    return Hang(table.generation, suspect.seat.node_id, group.first_rank, message, is_blameless, pid=group.pid)


def _listed(places: Sequence[_Place]) -> str:
    more = f", and {len(places) - _NAMED_MAX} more groups" if len(places) > _NAMED_MAX else ""
    return ", ".join(place.text for place in places[:_NAMED_MAX]) + more


def _who(ranks: Sequence[str], count: int) -> str:
    numbers = [text.removeprefix("ranks ").removeprefix("rank ") for text in ranks]
    if len(numbers) > _NAMED_MAX:
        return f"ranks {', '.join(numbers[:_NAMED_MAX])}, … ({count} ranks)"
    return f"{'rank' if count == 1 else 'ranks'} {', '.join(numbers)}"


def _plural(does: str) -> str:
    """What several ranks do: "waits in …" becomes "wait in …"."""
    verb, blank, more = does.partition(" ")
    plural = {"is": "are", "shows": "show", "uses": "use"}.get(verb, verb.removesuffix("s"))
    return f"{plural}{blank}{more}"
