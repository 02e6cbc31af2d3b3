"""Reads the records of the fault tests' workers (reducer.py), and finds the generations that have met."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.nodes import Node

Record = dict[str, Any]


@dataclass(frozen=True)
class Meeting:
    """A generation all of whose ranks have met in an all-reduce. `records` are the first ones after it, by rank."""

    generation: int
    records: Mapping[int, Record]

    @property
    def master_addr(self) -> str:
        return str(self.records[0]["master_addr"])

    @property
    def hosts(self) -> list[str]:
        """The host of each rank."""
        return [str(self.records[rank]["host"]) for rank in sorted(self.records)]

    @property
    def restarts(self) -> int:
        """How many restarts the job has used."""
        return int(self.records[0]["restarts"])

    def pid(self, rank: int) -> int:
        return int(self.records[rank]["pid"])

    def ranks_on(self, node: Node) -> list[int]:
        return [rank for rank, host in enumerate(self.hosts) if host == node.name]


class Records:
    """The file that all workers of a job append to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._known: list[Record] = []

    def all(self) -> list[Record]:
        """What is there now, in its order."""
        if self._path.exists():
            with self._path.open() as file:
                file.seek(self._offset)
                # The last line may be half written.
                whole, _, _ = file.read().rpartition("\n")
            if whole:
                self._offset += len(whole.encode()) + 1
                self._known += [json.loads(line) for line in whole.split("\n")]
        return self._known

    def of(self, event: str = "", generation: int | None = None, *, since: int = 0) -> list[Record]:
        """The records of an event and a generation, from record number `since` on."""
        records = self.all()[since:]
        return [r for r in records if event in ("", r["event"]) and generation in (None, r["generation"])]

    def meeting(self, world_size: int, oldest: int = 0) -> Meeting | None:
        """The newest generation, if it is `oldest` or newer and so many ranks of it have met."""
        newest = max((r["generation"] for r in self.of("started")), default=-1)
        if newest < oldest:
            return None
        first: dict[int, Record] = {}
        for each in self.of("step", newest):
            first.setdefault(each["rank"], each)
        whole = len(first) == world_size and all(r["world_size"] == world_size for r in first.values())
        return Meeting(newest, first) if whole else None

    def check(self, meeting: Meeting, addresses: Mapping[str, tuple[str, ...]]) -> None:
        """All ranks agree on what must be the same. MASTER_ADDR is one of the `addresses` of rank 0's node."""
        records = [meeting.records[rank] for rank in sorted(meeting.records)]
        assert [r["rank"] for r in records] == list(range(len(records)))
        for name in ("master_addr", "master_port", "world_size", "restarts"):
            assert len({r[name] for r in records}) == 1, f"they do not agree on {name}: {records}"
        assert meeting.master_addr in addresses[meeting.hosts[0]]
        # Ranks of one node follow each other, and nodes are numbered in the order of their ranks.
        places = [(r["group_rank"], r["local_rank"]) for r in records]
        assert places == sorted(set(places)), places
        assert len({(r["group_rank"], r["host"]) for r in records}) == len({r["group_rank"] for r in records})
        started = self.of("started", meeting.generation)
        assert len(started) == len(records), f"more than one group in generation {meeting.generation}: {started}"

    def assert_ended_before(self, meeting: Meeting, *, rank: int, generation: int) -> None:
        """No record of an old generation comes after that rank of a newer generation began."""
        (began,) = (r for r in self.of("started", meeting.generation) if r["rank"] == rank)
        late = [r for r in self.of(generation=generation) if r["at_s"] > began["at_s"]]
        assert not late, f"generation {generation} ran on beside a newer one: {late}"
