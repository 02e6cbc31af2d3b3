"""A job's keys in the store, and the state that they hold at one revision.

Keys begin with `<prefix><run_id>/`. Generations are padded to ten digits: else `table/10` would sort before `table/9`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from elaunch.records import dataclass, field
from elaunch.rendezvous.codec import Decoded, decode
from elaunch.rendezvous.endpoint import PREFIX
from elaunch.rendezvous.rules.credible import check, check_generation_of_key
from elaunch.rendezvous.rules.table_codec import decode_table
from elaunch.rendezvous.store import Absent, KeyEntry, Put, Unchanged, View
from elaunch.rendezvous.types import Failure, Generation, Joined, Node, Outcome, RankTable, Terms

if TYPE_CHECKING:
    from elaunch.rendezvous.rules.hang_records import Hang, StillNode
    from elaunch.rendezvous.rules.pace import NodePace, SlowNode
    from elaunch.rendezvous.rules.questions import Question

Belonging = TypeVar("Belonging", "Node", "Joined", "StillNode", "NodePace")
# Without such a record the job goes on: a sentence says that it cannot be read.
_SPARED = (["failures"], ["still"], ["pace"], ["ctl", "hang"], ["ctl", "slow"], ["ctl", "cause"])


@dataclass(frozen=True)
class Keys:
    """The names of one job's keys. `prefix` starts and ends with a slash."""

    run_id: str
    prefix: str = PREFIX

    @cached_property
    def root(self) -> str:
        # A slash in the run id would put one job's keys among those of another job.
        return f"{self.prefix}{quote(self.run_id, safe='')}/"

    @cached_property
    def control(self) -> str:
        """The prefix that every node watches; the leader watches `root`."""
        return f"{self.root}ctl/"

    @cached_property
    def members(self) -> str:
        return f"{self.root}members/"

    @property
    def spec(self) -> str:
        # Under ctl/, so that the one watch of every node covers it.
        return f"{self.control}spec"

    @property
    def generation(self) -> str:
        return f"{self.control}generation"

    @property
    def leader(self) -> str:
        return f"{self.control}leader"

    @property
    def starter(self) -> str:
        """The node that has claimed the start of the first run."""
        return f"{self.control}starter"

    @property
    def ended(self) -> str:
        return f"{self.control}ended"

    @property
    def question(self) -> str:
        """What somebody asks all nodes of the job (`questions`)."""
        return f"{self.control}question"

    def answers(self, identity: str, node_id: str = "") -> str:
        """A node's answer to that question. It is no key of any job: a quoted run id has no question mark."""
        return f"{self.prefix}?answers/{quote(self.run_id, safe='')}/{identity}/{node_id}"

    def member(self, node_id: str) -> str:
        return f"{self.members}{node_id}"

    def joined(self, generation: int, node_id: str = "") -> str:
        return f"{self.root}joined/{generation:010}/{node_id}"

    def failure(self, generation: int, node_id: str = "") -> str:
        return f"{self.root}failures/{generation:010}/{node_id}"

    def detailed(self, generation: int, node_id: str = "") -> str:
        """The key that marks this node's failure record as the full record of the generation."""
        return f"{self.root}detailed/{generation:010}/{node_id}"

    def done(self, generation: int, node_id: str = "") -> str:
        return f"{self.root}done/{generation:010}/{node_id}"

    def still(self, generation: int, node_id: str = "") -> str:
        """The key by which this node says that all of its ranks stand still."""
        return f"{self.root}still/{generation:010}/{node_id}"

    @property
    def hang(self) -> str:
        """The leader's verdict that the job hangs."""
        return f"{self.control}hang"

    def pace(self, generation: int, node_id: str = "") -> str:
        """The key by which this node says how long its ranks wait in collectives."""
        return f"{self.root}pace/{generation:010}/{node_id}"

    @property
    def slow(self) -> str:
        """The leader's verdict that all other nodes wait for one."""
        return f"{self.control}slow"

    def cause(self, generation: int) -> str:
        """The failure that explains the one by which the generation after this one was opened."""
        return f"{self.control}cause/{generation:010}"

    def table(self, generation: int) -> str:
        return f"{self.control}table/{generation:010}"


@dataclass(frozen=True)
class Snapshot:
    """The state on which decisions are based, as it was at `revision`.

    A follower's snapshot holds what is under `ctl/`. Only a `whole` snapshot has members, joined, failures (in the
    order in which they were recorded), done, still and pace. `causes` are failures that explain an earlier one of the
    same generation. `starter` has claimed the start of the first run. `question` is what somebody asks the nodes;
    nothing is decided from it, nor from `causes`. `unreadable` holds sentences about records that could not be read.
    """

    keys: Keys
    revision: int = 0
    whole: bool = False
    terms: Terms | None = None
    lease: int = 0
    generation: Generation | None = None
    generation_revision: int = 0
    starter: str = ""
    leader: str = ""
    leader_revision: int = 0
    ended: Outcome | None = None
    members: Mapping[str, Node] = field(default_factory=dict)
    joined: Mapping[int, Mapping[str, Joined]] = field(default_factory=dict)
    failures: Mapping[int, tuple[Failure, ...]] = field(default_factory=dict)
    done: Mapping[int, frozenset[str]] = field(default_factory=dict)
    still: Mapping[int, Mapping[str, StillNode]] = field(default_factory=dict)
    tables: Mapping[int, RankTable] = field(default_factory=dict)
    causes: Mapping[int, Failure] = field(default_factory=dict)
    question: Question | None = None
    hang: Hang | None = None
    pace: Mapping[int, Mapping[str, NodePace]] = field(default_factory=dict)
    slow: SlowNode | None = None
    unreadable: tuple[str, ...] = ()

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
        """Still leader: nobody has taken over since this was read."""
        return Unchanged(self.keys.leader, self.leader_revision)

    def put(self, key: str, value: str) -> Put:
        """Write a key that belongs to the run, not to a node: it is attached to the run's lease."""
        return Put(key, value, self.lease)


class SnapshotReader:
    """Turns views of one job's keys into snapshots. A record that has not changed is decoded only once."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        # For each key: its entry, the decoded record, and the parts of the key.
        self._known: dict[str, tuple[KeyEntry, Any, list[str]]] = {}

    def read(self, view: View, *, whole: bool) -> Snapshot:
        """The snapshot for `view`.

        If somebody has overwritten a record with something unreadable, the last readable record counts. Without one, an
        unreadable failure is left out, and any other unreadable record raises ValueError with the name of the key.
        """
        keys, known = self._keys, {}
        unreadable: list[str] = []
        fields: dict[str, Any] = {}
        members: dict[str, Node] = {}
        joined: dict[int, dict[str, Joined]] = {}
        failures: dict[int, list[tuple[int, Failure]]] = {}
        done: dict[int, set[str]] = {}
        still: dict[int, dict[str, StillNode]] = {}
        pace: dict[int, dict[str, NodePace]] = {}
        tables: dict[int, RankTable] = {}
        causes: dict[int, Failure] = {}
        for key, entry in view.entries.items():
            before = self._known.get(key)
            # The leader of many nodes reads often, and few entries have changed.
            if before is None or (before[0] is not entry and before[0] != entry):
                parts = key[len(keys.root) :].split("/")
                record = self._record(key, entry, parts, unreadable)
                known[key] = entry, record, parts
            else:
                known[key] = before
                _, record, parts = before
            match parts:
                case ["members", node_id]:
                    members[node_id] = record
                case ["joined", generation, node_id]:
                    joined.setdefault(int(generation), {})[node_id] = record
                case ["failures", generation, _] if record is not None:
                    failures.setdefault(int(generation), []).append((entry.create_revision, record))
                case ["done", generation, node_id]:
                    done.setdefault(int(generation), set()).add(node_id)
                case ["still", generation, node_id] if record is not None:
                    still.setdefault(int(generation), {})[node_id] = record
                case ["pace", generation, node_id] if record is not None:
                    pace.setdefault(int(generation), {})[node_id] = record
                case ["ctl", "hang"]:
                    fields |= {"hang": record}
                case ["ctl", "slow"]:
                    fields |= {"slow": record}
                case ["ctl", "table", generation]:
                    tables[int(generation)] = record
                case ["ctl", "cause", generation] if record is not None:
                    causes[int(generation)] = record
                case ["ctl", "spec"]:
                    fields |= {"terms": record, "lease": entry.lease}
                case ["ctl", "generation"]:
                    fields |= {"generation": record, "generation_revision": entry.mod_revision}
                case ["ctl", "starter"]:
                    fields |= {"starter": record}
                case ["ctl", "leader"]:
                    fields |= {"leader": record, "leader_revision": entry.mod_revision}
                case ["ctl", "ended"]:
                    fields |= {"ended": record}
                case ["ctl", "question"]:
                    fields |= {"question": record}
        self._known = known
        return Snapshot(
            keys=keys,
            revision=view.revision,
            whole=whole,
            members=members,
            joined=joined,
            failures={g: tuple(f for _, f in sorted(records, key=lambda r: r[0])) for g, records in failures.items()},
            done={g: frozenset(nodes) for g, nodes in done.items()},
            still=still,
            pace=pace,
            tables=tables,
            causes=causes,
            unreadable=tuple(unreadable),
            **fields,
        )

    def _record(self, key: str, entry: KeyEntry, parts: list[str], unreadable: list[str]) -> Any:
        """The record in an entry; None where an unreadable one can be done without."""
        known = self._known.get(key)
        try:
            _check_number(parts)
            return _decoder(parts)(entry.value)
        except ValueError as error:
            sentence = f"{key} in the store is {error}"
            if known is None and parts[:1] not in _SPARED and parts[:2] not in _SPARED:
                raise ValueError(sentence) from error
            unreadable.append(sentence)
            return known[1] if known else None


def _check_number(parts: list[str]) -> None:
    """Raises ValueError if a key that must contain a generation does not."""
    match parts:
        case ["joined" | "failures" | "detailed" | "done" | "still" | "pace", number, _]:
            check_generation_of_key(number)
        case ["ctl", "table" | "cause", number]:
            check_generation_of_key(number)


def _decoder(parts: list[str]) -> Callable[[str], Any]:
    match parts:
        case ["members", node_id]:
            return lambda text: _of_node(node_id, _credible(Node, text))
        case ["joined", _, node_id]:
            return lambda text: _of_node(node_id, _credible(Joined, text))
        case ["failures", _, _] | ["ctl", "cause", _]:
            return lambda text: _credible(Failure, text)
        case ["ctl", "table", generation]:
            return lambda text: _of_generation(int(generation), decode_table(text))
        case ["ctl", "spec"]:
            return lambda text: _credible(Terms, text)
        case ["ctl", "generation"]:
            return lambda text: _credible(Generation, text)
        case ["ctl", "ended"]:
            return lambda text: _credible(Outcome, text)
        # Imported here: few jobs hang, or are asked.
        case ["ctl", "question"]:
            from elaunch.rendezvous.rules.questions import read_question

            return read_question
        case ["still", _, node_id]:
            from elaunch.rendezvous.rules.hang_records import StillNode, check_hang_record

            return lambda text: _of_node(node_id, _credible(StillNode, text, check_hang_record))
        case ["pace", _, node_id]:
            from elaunch.rendezvous.rules.pace import NodePace, check_pace

            return lambda text: _of_node(node_id, _credible(NodePace, text, check_pace))
        case ["ctl", "slow"]:
            from elaunch.rendezvous.rules.pace import SlowNode, check_pace

            return lambda text: _credible(SlowNode, text, check_pace)
        case ["ctl", "hang"]:
            from elaunch.rendezvous.rules.hang_records import Hang, check_hang_record

            return lambda text: _credible(Hang, text, check_hang_record)
        case _:
            return lambda text: text


def _credible(kind: type[Decoded], text: str, check: Callable[[Any], None] = check) -> Decoded:
    record = decode(kind, text)
    try:
        check(record)
    except ValueError as error:
        raise ValueError(f"not a {kind.__name__}: {text[:200]!r} ({error})") from None
    return record


def _of_node(node_id: str, record: Belonging) -> Belonging:
    if record.node_id != node_id:
        raise ValueError(f"not that of {node_id[:40]!r}: it names {record.node_id[:40]!r}")
    return record


def _of_generation(generation: int, table: RankTable) -> RankTable:
    if table.generation != generation:
        raise ValueError(f"not that of generation {generation}: it names {table.generation}")
    return table
