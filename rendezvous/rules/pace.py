"""Which node the ranks of all other nodes wait for, again and again: the records, the leader's rule, its transactions.

Clocks of hosts differ by more than the time that matters. So each node says for which share of the time its ranks wait
in collectives. Ranks of a job step together: those of the slow node wait least.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from elaunch.records import dataclass
from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.limits import Bounded, keep_head
from elaunch.rendezvous.rules.snapshot import Snapshot
from elaunch.rendezvous.rules.transactions import leader_guards
from elaunch.rendezvous.store import Present, Txn
from elaunch.rendezvous.types import Node, RankTable, host_of

# All ranks of other nodes wait for so much more of the time than the slow rank. Shares of four minutes are right to a
# tenth.
_GAP_MIN = 0.15
# A node whose shares change by more than this says so.
_NEWS_MIN = 0.05
# The verdict must hold for longer than a node takes to see that it waits for another share of the time.
CONFIRM_S = 300.0
_RANK_END = 1 << 31

_Id = Annotated[str, keep_head(300)]


@dataclass(frozen=True)
class NodePace(Bounded):
    """For which share of the time the ranks of this node wait in collectives.

    `rank` waits least, for the share `least`. The rank that waits most does so for the share `most`.
    """

    node_id: _Id
    rank: int
    least: float
    most: float


@dataclass(frozen=True)
class SlowNode(Bounded):
    """The leader's verdict on `generation`: all other nodes wait for a rank of this one, or, if `is_whole`, for all.

    `rank` waits for the share `waits` of the time, and each rank of another node for the share `others` or more.
    """

    generation: int
    node_id: _Id
    rank: int
    is_whole: bool
    waits: float
    others: float


def pace_of(node_id: str, shares: Mapping[int, float]) -> NodePace:
    """The record of a node, from its ranks' shares."""
    rank = min(shares, key=lambda rank: (shares[rank], rank))
    return NodePace(node_id, rank, shares[rank], max(shares.values()))


def is_news(told: NodePace | None, pace: NodePace) -> bool:
    """Whether the store must learn of it. Which of several equal ranks waits least is no news."""
    if told is None:
        return True
    is_another = pace.rank != told.rank and pace.most - pace.least >= _GAP_MIN
    return is_another or max(abs(pace.least - told.least), abs(pace.most - told.most)) > _NEWS_MIN


def tell_pace(snapshot: Snapshot, me: Node, generation: int, pace: NodePace) -> Txn:
    """Write for which share of the time the ranks of this node wait."""
    put = snapshot.put(snapshot.keys.pace(generation, me.node_id), encode(pace))
    return Txn((snapshot.gen_guard, snapshot.live_guard), (put,))


def slow_node(paces: Mapping[str, NodePace], table: RankTable) -> SlowNode | None:
    """The node that all others wait for. None while a node has said nothing yet."""
    seats = {seat.node_id: seat for seat in table.seats}
    if len(seats) < 2 or any(node_id not in paces for node_id in seats):
        return None
    pace, *others = sorted((paces[node_id] for node_id in seats), key=lambda pace: (pace.least, pace.rank))
    least = min(other.least for other in others)
    if least - pace.least < _GAP_MIN:
        return None
    is_whole = seats[pace.node_id].slots > 1 and least - pace.most >= _GAP_MIN
    return SlowNode(table.generation, pace.node_id, pace.rank, is_whole, pace.least, least)


def declare_slow(snapshot: Snapshot, slow: SlowNode) -> Txn:
    """Write the verdict, in the place of the one before."""
    keys = snapshot.keys
    guards = (*leader_guards(snapshot), Present(keys.pace(slow.generation, slow.node_id)))
    return Txn(guards, (snapshot.put(keys.slow, encode(slow)),))


def slow_node_words(slow: SlowNode) -> str:
    """The verdict as a sentence."""
    who = "all ranks of" if slow.is_whole else f"rank {slow.rank} on"
    verb, it = ("are", "they") if slow.is_whole else ("is", "it")
    theirs = f"{slow.others:.0%} of the time or more"
    return (
        f"{who} {host_of(slow.node_id)} {verb} slower than the ranks of the other nodes: those wait in collectives for"
        f" {theirs}, and {it} for {slow.waits:.0%}"
    )


def check_pace(record: NodePace | SlowNode) -> None:
    """Raises ValueError for a record that is not credible."""
    match record:
        case NodePace():
            shares = (record.least, record.most)
        case SlowNode():
            shares = (record.waits, record.others)
            if not 0 <= record.generation < 10**10:
                raise ValueError(f"generation {record.generation} is out of range")
    if not 0 <= record.rank < _RANK_END:
        raise ValueError(f"rank {record.rank} is out of range")
    if not 0 <= shares[0] <= shares[1] <= 1:
        raise ValueError(f"shares {shares[0]} and {shares[1]} are out of order")
    # It goes to terminals.
    if not record.node_id.isprintable():
        raise ValueError(f"{record.node_id[:40]!r} is no name")
