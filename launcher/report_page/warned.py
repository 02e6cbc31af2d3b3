"""What the agents warned of while the job went on: a hang of the whole job, a slow rank (pure)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from elaunch.launcher.report_page.events import PastEvent
from elaunch.launcher.report_page.faults import Fault
from elaunch.launcher.report_page.node_log import NodeLog, homes_of

# All nodes tell of one hang within this time.
_SAME_S = 10.0
_CAUSES_MAX = 8
# For so long a rank was slow before it is named.
_SLOW_S = 480


class WarnedKind(Enum):
    """What an agent warned of. The value is its name in `--json`."""

    HANG = "hang"
    SLOW = "slow rank"


@dataclass(frozen=True)
class Warned:
    """One warning. Times are seconds of the job: `at_s` is when it was said, `since_s` when it was so first, if known.

    `until_s` is when the job went on after a hang, NaN if no event says so. `rank` is -1 if the warning names none.
    `is_failure` says that the hang became a failure, which the page has among the failures. `folder` is of `host`.
    `causes` name what may make a rank slow.
    """

    kind: WarnedKind
    generation: int
    at_s: float
    since_s: float
    host: str
    rank: int
    local_rank: int
    sentence: str
    folder: str
    until_s: float = math.nan
    is_failure: bool = False
    causes: tuple[str, ...] = ()


def warned_of(nodes: Sequence[NodeLog], faults: Sequence[Fault]) -> tuple[Warned, ...]:
    """All warnings, in the order in which they were said."""
    found = [*_hangs(nodes, faults), *_slow_ranks(nodes)]
    return tuple(sorted(found, key=lambda warned: warned.at_s))


def _hangs(nodes: Sequence[NodeLog], faults: Sequence[Fault]) -> Iterator[Warned]:
    """The hangs of the job, each once, although each node tells of it."""
    homes = homes_of(nodes)
    failed = {fault.generation for fault in faults if fault.kind == "hang"}
    went_on: dict[int, list[float]] = {}
    for at_s, event in _events(nodes, "goes_on"):
        went_on.setdefault(event.generation, []).append(at_s)
    said_s: dict[tuple[int, str], float] = {}
    for at_s, event in _events(nodes, "seems_hung"):
        key = (event.generation, event.text("message"))
        is_known = at_s - said_s.get(key, -math.inf) <= _SAME_S
        said_s[key] = at_s
        if is_known:
            continue
        later = went_on.get(event.generation, [])
        at = bisect_left(later, at_s)
        until_s = later[at] if at < len(later) else math.nan
        host = event.text("host")
        home = homes.get((host, event.generation, event.number("rank"))) or homes.get((host, -1, -1))
        yield Warned(
            WarnedKind.HANG,
            event.generation,
            at_s,
            math.nan,
            host,
            event.number("rank"),
            _local_rank(home, event) if home else -1,
            _hang_words(event),
            home.folder if home else "",
            until_s,
            is_failure=event.generation in failed and math.isnan(until_s),
        )


def _hang_words(event: PastEvent) -> str:
    rank, said = event.number("rank"), event.text("message")
    who = f"rank {rank} on {event.text('host')} {said.removeprefix('it ')}" if rank >= 0 else said
    return f"the job seemed to hang: {who}"


def _slow_ranks(nodes: Sequence[NodeLog]) -> Iterator[Warned]:
    for node in nodes:
        for at_s, event in _events([node], "slow"):
            rank = event.number("rank")
            yield Warned(
                WarnedKind.SLOW,
                event.generation,
                at_s,
                max(at_s - event.number("lasted_s", _SLOW_S), 0.0),
                node.host,
                rank,
                _local_rank(node, event),
                event.text("text") or _slow_words(node, event),
                node.folder,
                causes=event.texts("causes")[:_CAUSES_MAX],
            )


def _slow_words(node: NodeLog, event: PastEvent) -> str:
    """The sentence for the event of an elaunch whose events have none."""
    rank, percent = event.number("rank"), event.number("wait_percent")
    waited = f"they waited for it {percent} % of the time" if percent >= 0 else "they waited for it"
    return f"rank {rank} was slower than the other ranks of {node.host}: {waited}"


def _events(nodes: Sequence[NodeLog], name: str) -> list[tuple[float, PastEvent]]:
    found = [(at_s, event) for node in nodes for at_s, event in node.events if event.event == name]
    return sorted(found, key=lambda each: each[0])


def _local_rank(node: NodeLog, event: PastEvent) -> int:
    """The place of the event's rank on its node, -1 if it is not there."""
    at = bisect_left(node.visits, event.generation, key=lambda visit: visit.generation)
    is_there = at < len(node.visits) and node.visits[at].generation == event.generation
    workers = node.visits[at].workers if is_there else ()
    return next((worker.local_rank for worker in workers if worker.rank == event.number("rank")), -1)
