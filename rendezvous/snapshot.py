"""A job's keys, and what they say at one moment.

Keys stand under `/elaunch/<run_id>/`; generations are padded to ten digits, or `table/10` would sort before `table/9`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elaunch.rendezvous.codec import decode
from elaunch.rendezvous.store import Absent, Unchanged, View
from elaunch.rendezvous.types import Failure, Generation, JobSpec, Joined, Node, Outcome, RankTable


@dataclass(frozen=True)
class Keys:
    """The names of one job's keys."""

    run_id: str

    @property
    def root(self) -> str:
        return f"/elaunch/{self.run_id}/"

    @property
    def spec(self) -> str:
        return f"{self.root}spec"

    @property
    def generation(self) -> str:
        return f"{self.root}ctl/generation"

    @property
    def leader(self) -> str:
        return f"{self.root}ctl/leader"

    @property
    def ended(self) -> str:
        return f"{self.root}ctl/ended"

    def member(self, node_id: str) -> str:
        return f"{self.root}members/{node_id}"

    def joined(self, generation: int, node_id: str) -> str:
        return f"{self.root}joined/{generation:010}/{node_id}"

    def failure(self, generation: int, node_id: str) -> str:
        return f"{self.root}failures/{generation:010}/{node_id}"

    def done(self, generation: int, node_id: str) -> str:
        return f"{self.root}done/{generation:010}/{node_id}"

    def table(self, generation: int) -> str:
        return f"{self.root}ctl/table/{generation:010}"


@dataclass(frozen=True)
class Snapshot:
    """Everything that a decision may look at. `failures` are in the order in which they were recorded."""

    keys: Keys
    spec: JobSpec | None = None
    generation: Generation | None = None
    generation_revision: int = 0
    leader: str = ""
    ended: Outcome | None = None
    members: Mapping[str, Node] = field(default_factory=dict)
    joined: Mapping[int, tuple[Joined, ...]] = field(default_factory=dict)
    failures: Mapping[int, tuple[Failure, ...]] = field(default_factory=dict)
    done: Mapping[int, frozenset[str]] = field(default_factory=dict)
    tables: Mapping[int, RankTable] = field(default_factory=dict)

    @property
    def table(self) -> RankTable | None:
        """The newest table, which may be an older generation's."""
        return self.tables[max(self.tables)] if self.tables else None

    @property
    def gen_guard(self) -> Unchanged:
        """GEN: no generation was opened since this was read."""
        return Unchanged(self.keys.generation, self.generation_revision)

    @property
    def live_guard(self) -> Absent:
        """LIVE: the job has not ended."""
        return Absent(self.keys.ended)


def read_snapshot(keys: Keys, view: View) -> Snapshot:
    """What the keys of `view` (a read of `keys.root`) say. Raises ValueError on a record that is none."""
    entries = {key.removeprefix(keys.root): entry for key, entry in view.entries.items()}
    joined: dict[int, list[Joined]] = {}
    failures: dict[int, list[tuple[int, Failure]]] = {}
    done: dict[int, set[str]] = {}
    members: dict[str, Node] = {}
    tables: dict[int, RankTable] = {}
    for key, entry in entries.items():
        match key.split("/"):
            case ["members", node_id]:
                members[node_id] = decode(Node, entry.value)
            case ["joined", generation, _]:
                joined.setdefault(int(generation), []).append(decode(Joined, entry.value))
            case ["failures", generation, _]:
                record = (entry.create_revision, decode(Failure, entry.value))
                failures.setdefault(int(generation), []).append(record)
            case ["done", generation, node_id]:
                done.setdefault(int(generation), set()).add(node_id)
            case ["ctl", "table", generation]:
                tables[int(generation)] = decode(RankTable, entry.value)
    generation_entry = entries.get("ctl/generation")
    return Snapshot(
        keys=keys,
        spec=decode(JobSpec, entries["spec"].value) if "spec" in entries else None,
        generation=decode(Generation, generation_entry.value) if generation_entry else None,
        generation_revision=generation_entry.mod_revision if generation_entry else 0,
        leader=entries["ctl/leader"].value if "ctl/leader" in entries else "",
        ended=decode(Outcome, entries["ctl/ended"].value) if "ctl/ended" in entries else None,
        members=members,
        joined={g: tuple(nodes) for g, nodes in joined.items()},
        failures={g: tuple(f for _, f in sorted(records, key=lambda r: r[0])) for g, records in failures.items()},
        done={g: frozenset(nodes) for g, nodes in done.items()},
        tables=tables,
    )
