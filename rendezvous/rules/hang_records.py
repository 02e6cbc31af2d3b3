"""Records about a hang: what a node says of ranks that stand still, and the verdict for the job; and their checks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from elaunch.rendezvous.limits import Bounded, keep_head

# A node's ranks stand at a few places. More groups than this are not worth a larger record.
GROUPS_MAX = 8
_RANK_END = 1 << 31
_TIME_END_S = 1e9

_Words = Annotated[str, keep_head(400)]
_Id = Annotated[str, keep_head(300)]


class StillKind(Enum):
    """Why a rank stands still, as far as its node can tell."""

    WAITS = "waits"  # In a call that only other ranks can end.
    STOPPED = "stopped"  # By a signal.
    RUNS = "runs"  # In a loop, or a C function, that does nothing else and lets no other thread run.
    STUCK = "stuck"  # It waits for a lock or for a data loader, and no thread or child of it does anything.
    ELSEWHERE = "elsewhere"  # It may go on by itself: a file, the network, a sleep.
    UNKNOWN = "unknown"  # It uses no CPU, and its stack cannot be read.


@dataclass(frozen=True)
class StillGroup(Bounded):
    """Ranks of one node that stand still at the same place; `pid` is the process of `first_rank`.

    `ranks` names them ("ranks 0, 2–3"), `count` is their number. `where` is the place, equal on all nodes for ranks at
    the same place. `does` is what they do, as the middle of a sentence.
    """

    kind: StillKind
    first_rank: int
    count: int
    ranks: _Words
    where: _Words
    does: _Words
    pid: int = -1


@dataclass(frozen=True)
class StillNode(Bounded):
    """A node says that all of its ranks stand still, for `still_s` when it wrote this.

    `is_ready` says that this is long enough for what they do. `exited` names ranks of this node that have exited with 0
    before; empty if there are none, and then `exited_rank` is -1. `is_lingering` says that the processes of some of
    these are still there, after the end of their programs.
    """

    node_id: _Id
    still_s: float
    is_ready: bool
    groups: tuple[StillGroup, ...]
    exited: _Words = ""
    exited_rank: int = -1
    is_lingering: bool = False


@dataclass(frozen=True)
class Hang(Bounded):
    """The leader's verdict: the job hangs in `generation`.

    `rank` is the rank to name, -1 where none differs from the others; `node_id` is its node, else rank 0's. `message`
    is the sentence about it, as in `Failure`. `is_blameless` as in `Failure`, too: a rank is named by order alone.
    `is_unawaited` says that no rank waits for it, since all others have ended: that is no failure. `pid` is the named
    rank's process, -1 if that is not known.
    """

    generation: int
    node_id: _Id
    rank: int
    message: Annotated[str, keep_head(2 << 10)]
    is_blameless: bool = False
    is_unawaited: bool = False
    pid: int = -1

    @property
    def said(self) -> str:
        """The message without the words that join it to a failure's sentence."""
        return self.message.removeprefix("hung: ").rstrip(",")


def hang_words(hang: Hang, host: str) -> str:
    """The verdict as a sentence that begins with the rank it names, on `host`."""
    if hang.rank < 0:
        return hang.said
    where = f"(pid {hang.pid} on {host})" if hang.pid > 0 else f"on {host}"
    return f"rank {hang.rank} {where} {hang.said.removeprefix('it ')}"


def check_hang_record(record: StillNode | Hang) -> None:
    """Raises ValueError for a record that is not credible."""
    match record:
        case StillNode():
            if not (math.isfinite(record.still_s) and 0 <= record.still_s < _TIME_END_S):
                raise ValueError(f"still_s {record.still_s} is out of range")
            if len(record.groups) > GROUPS_MAX:
                raise ValueError(f"{len(record.groups)} groups are more than a node writes")
            for group in record.groups:
                if not (0 <= group.first_rank < _RANK_END and 0 < group.count < _RANK_END):
                    raise ValueError(f"ranks {group.first_rank}, {group.count} are out of range")
                _check_text(group.ranks, group.where, group.does)
            if not -1 <= record.exited_rank < _RANK_END:
                raise ValueError(f"exited_rank {record.exited_rank} is out of range")
            _check_text(record.exited)
        case Hang():
            if not (0 <= record.generation < 10**10 and -1 <= record.rank < _RANK_END):
                raise ValueError(f"rank {record.rank} of generation {record.generation} is out of range")
            _check_text(record.message, record.node_id)


def _check_text(*texts: str) -> None:
    """They go to every node's terminal: no control characters."""
    for text in texts:
        if not text.isprintable():
            raise ValueError(f"{text[:40]!r} is no text for people")
