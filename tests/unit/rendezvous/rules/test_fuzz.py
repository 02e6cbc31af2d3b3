"""Whatever stands in the store, whoever wrote it, gives a record or a sentence; and no decision fails on it."""

from __future__ import annotations

import json
import re
import zlib
from base64 import b64encode
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaunch.agent.core.events import SnapshotChanged, Tick
from elaunch.agent.core.step import step
from elaunch.rendezvous.codec import decode, encode
from elaunch.rendezvous.rules.hang_verdict import Hang, IdleGroup, IdleNode, IdleReason
from elaunch.rendezvous.rules.leader import LeaderState, lead
from elaunch.rendezvous.rules.snapshot import (
    UNPACKED_BYTES_MAX,
    Keys,
    Snapshot,
    SnapshotReader,
    decode_table,
    encode_table,
    seats_of,
)
from elaunch.rendezvous.store import KeyEntry, View
from elaunch.rendezvous.times import Times
from elaunch.rendezvous.types import (
    Failure,
    FailureKind,
    Generation,
    Joined,
    Node,
    OpenKind,
    Outcome,
    OutcomeKind,
    RankTable,
    Terms,
)
from elaunch.strict_json import parse_json
from tests.fuzzing import NESTED, TEXTS, bounded, json_texts
from tests.unit.agent.driver import Driver

KEYS = Keys("job")
FAILURE = Failure(FailureKind.EXCEPTION, 1, "a-1", "a", 0, 0, 17, 1, "raised ValueError: x", failed_at=1e9)
TABLE = RankTable(1, seats_of([("a-1", 2, "default"), ("b-2", 2, "default")]), "10.0.0.1", 29500, "all are there")
STILL = IdleGroup(IdleReason.WAITS, 0, 2, "ranks 0, 1", "all_reduce (a.py:1)", "waits in all_reduce")
RECORDS = {
    KEYS.spec: encode(Terms(2, 4, 3, None, "train.py", "0123456789abcdef")),
    KEYS.generation: encode(Generation(1, OpenKind.FAIL, "rank 0 failed", "a-1")),
    KEYS.ended: encode(Outcome(OutcomeKind.FAILED, "the budget is spent", 1, 3, 3, FAILURE)),
    KEYS.member("a-1"): encode(Node("a-1", "a", "10.0.0.1", 2)),
    KEYS.member("b-2"): encode(Node("b-2", "b", "10.0.0.2", 2)),
    KEYS.joined(1, "a-1"): encode(Joined("a-1", 29500)),
    KEYS.joined(1, "b-2"): encode(Joined("b-2", 29501)),
    KEYS.failure(1, "a-1"): encode(FAILURE),
    KEYS.still(1, "a-1"): encode(IdleNode("a-1", 61.0, True, (STILL,))),
    KEYS.still(1, "b-2"): encode(IdleNode("b-2", 61.0, True, (replace(STILL, first_rank=2),))),
    KEYS.hang: encode(Hang(1, "a-1", 0, "hung: it waits,")),
    KEYS.table(1): encode_table(TABLE),
    KEYS.table(0): encode_table(replace(TABLE, generation=0)),
}
PLAIN_KEYS = {KEYS.leader: "a-1", KEYS.done(1, "a-1"): ""}


def entry(value: str) -> KeyEntry:
    return KeyEntry(value, 1, 2, 0)


@st.composite
def views(draw: st.DrawFn) -> View:
    """Some keys of a job: a few overwritten, and some that the protocol does not have."""
    kept = draw(st.sets(st.sampled_from(sorted(RECORDS)), min_size=1))
    broken = draw(st.sets(st.sampled_from(sorted(kept)), max_size=3))
    found = {key: draw(json_texts(value)) if key in broken else value for key, value in RECORDS.items() if key in kept}
    found |= {key: value for key, value in PLAIN_KEYS.items() if draw(st.booleans())}
    if draw(st.booleans()):
        folder = draw(st.sampled_from(["ctl/table/", "joined/", "failures/", "done/", "members/", "ctl/", ""]))
        tail = draw(st.sampled_from(["9" * 5000, "²", "-1", "0000000001/x/y", "", "٣/a"]) | TEXTS)
        found[f"{KEYS.root}{folder}{tail}"] = draw(TEXTS)
    return View(7, {key: entry(value) for key, value in found.items()})


@given(views(), views())
def test_whatever_the_keys_hold_is_a_snapshot_or_a_sentence(first: View, second: View) -> None:
    reader = SnapshotReader(KEYS)

    for view in (first, second):
        sentence = "a sentence"
        with bounded():
            try:
                reader.read(view, whole=True)
            except ValueError as error:
                sentence = str(error)
        assert 0 < len(sentence) < 10_000


def snapshot_of(view: View) -> Snapshot | None:
    try:
        return SnapshotReader(KEYS).read(view, whole=True)
    except ValueError:
        return None


@given(views(), st.sampled_from([0.0, 5.0, 1e6]))
def test_a_leader_decides_on_whatever_can_be_read(view: View, now_s: float) -> None:
    if snapshot := snapshot_of(view):
        with bounded():
            led = lead(snapshot, LeaderState(), Times(), now_s, 0.0, 0.0)
            lead(snapshot, led.leader_state, Times(), now_s + 1e6, 0.0, 0.0)


@given(st.lists(views(), min_size=1, max_size=3))
def test_an_agent_decides_on_whatever_can_be_read(shown: list[View]) -> None:
    driver = Driver()
    agent, now_s = driver.agent, driver.now_s

    for view in shown:
        if snapshot := snapshot_of(view):
            with bounded():
                agent, _ = step(agent, SnapshotChanged(snapshot), now_s)
                agent, _ = step(agent, Tick(), now_s + 700.0)


NAMES = st.text(st.characters(codec="utf-8"), max_size=20)
IDS = st.text("abcdefghij-0123456789.", min_size=1, max_size=30)
COUNTS = st.integers(0, 10**8)


@given(
    st.lists(st.tuples(IDS, st.integers(1, 16), st.sampled_from(["default", "a b", "é"])), max_size=300, unique_by=str),
    COUNTS,
    NAMES,
    st.lists(st.floats(0, 1e9).map(lambda age_s: round(age_s, 3)), max_size=3).map(tuple),
)
def test_every_table_comes_back_as_it_was_written(
    nodes: list[tuple[str, int, str]], generation: int, reason: str, ages_s: tuple[float, ...]
) -> None:
    unique = list({name: (name, slots, role) for name, slots, role in nodes}.values())
    table = RankTable(generation, seats_of(unique), "10.0.0.1", 29500, reason, restart_ages_s=ages_s)

    assert decode_table(encode_table(table)) == table


@given(st.binary(max_size=200) | TEXTS | st.sampled_from([NESTED, '{"a":' * 60_000, "9" * 100_000, b"\xff", "NaN"]))
def test_a_json_text_is_a_value_or_a_value_error(text: str | bytes) -> None:
    with bounded():
        try:
            parse_json(text)
        except ValueError:
            return


@given(json_texts(encode_table(TABLE)), st.binary(max_size=50), st.booleans())
def test_a_table_is_one_or_a_sentence(text: str, scribble: bytes, is_packed: bool) -> None:
    packed = "zlib:" + b64encode(zlib.compress(text.encode(errors="surrogatepass")) + scribble).decode()
    with bounded():
        try:
            table = decode_table(packed if is_packed else text)
        except ValueError:
            return
    assert decode_table(encode_table(table)).seats == table.seats


# What fuzzing and reading found, by name.


@pytest.mark.parametrize("kind", [Node, Joined, Failure, Terms, Generation, Outcome])
def test_a_record_of_60_kb_of_brackets_is_not_a_record(kind: type) -> None:
    with pytest.raises(ValueError, match=f"not a {kind.__name__}: .*(nested too deeply|Expecting value)"):
        decode(kind, NESTED)


def test_a_packed_table_that_grows_to_gigabytes_is_refused_before_it_does() -> None:
    packing = zlib.compressobj(1)
    block = b" " * (1 << 24)
    packed = b"".join(packing.compress(block) for _ in range(16)) + packing.flush()

    with bounded(memory_bytes=6 * UNPACKED_BYTES_MAX), pytest.raises(ValueError, match=r"more than .* bytes unpacked"):
        decode_table("zlib:" + b64encode(packed).decode())


@pytest.mark.parametrize(
    "changed",
    [
        {"slots": True}, {"slots": 0}, {"slots": -1}, {"slots": 10**9}, {"slots": 2**70}, {"slots": 2.0},
        {"node_id": "a/b"}, {"node_id": "a b"}, {"node_id": "\ud800"}, {"node_id": ""}, {"node_rank": -2},
        {"host": 1}, {"address": None}, {"role": ["x"]},
    ],
    ids=str,
)  # fmt: skip
def test_a_node_that_cannot_be_is_not_a_node(changed: dict[str, object]) -> None:
    record = json.dumps({**json.loads(RECORDS[KEYS.member("a-1")]), **changed})

    snapshot = SnapshotReader(KEYS).read(View(7, {KEYS.member("a-1"): entry(record)}), whole=True)

    assert snapshot.members == {}
    assert re.search(r"is not (a Node|that of)", snapshot.unreadable[0])


def test_a_name_that_is_there_twice_is_not_a_record() -> None:
    with pytest.raises(ValueError, match=r"not a Joined: .*a name is duplicated"):
        decode(Joined, '{"node_id":"a","port":1,"port":2}')


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "1" + "0" * 400])
def test_what_is_no_number_of_seconds_is_not_a_record(number: str) -> None:
    text = encode(FAILURE).replace("1000000000.0", number)

    with pytest.raises(ValueError, match="not a Failure"):
        decode(Failure, text)


def test_a_message_about_a_huge_record_is_short() -> None:
    with pytest.raises(ValueError, match="not a Terms") as caught:
        decode(Terms, json.dumps({"nodes_min": "x" * 8_000_000}))

    assert len(str(caught.value)) < 1000
