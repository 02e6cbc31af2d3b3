"""rendezvous.codec: records as text, and what is no record."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from elaunch.rendezvous.codec import decode, encode
from elaunch.rendezvous.job_spec import JobSpec, Program, ProgramKind
from elaunch.rendezvous.types import Failure, FailureKind, Generation, Joined, Node, OpenKind, Outcome, OutcomeKind

FAILURE = Failure(
    FailureKind.EXCEPTION,
    generation=3,
    node_id="node-a-1",
    host="node-a",
    rank=5,
    local_rank=1,
    pid=4711,
    code=1,
    message="raised ValueError: é \n \ud800 'x'",
    exception="ValueError",
    failed_at=1.25,
    progressed=True,
)
PROGRAM = Program(ProgramKind.MODULE, "pkg.train", ("--lr", "0.1", ""), "/usr/bin/python3")
TERMS = JobSpec("job", PROGRAM, 1, 4, 0, None).terms
RECORDS = [
    FAILURE,
    replace(FAILURE, code=None, kind=FailureKind.TEMPLATE_LOST),
    PROGRAM,
    JobSpec("job", PROGRAM, 1, 4, 0, None),
    JobSpec("job", PROGRAM, restart_window_s=30.0),
    TERMS,
    replace(TERMS, restart_window_s=30.0),
    Node("host-a-0000000a", "host-a", "10.0.0.1", 8, "boot:1:17", "trainer", 3, "rack-7"),
    Joined("a", 29500, progressed=True),
    *(Generation(7, kind, "rank 1 failed", "host-a-0000000a") for kind in OpenKind),
    Outcome(OutcomeKind.FAILED, "the budget is spent", 2, 3, 3, FAILURE),
    Outcome(OutcomeKind.INTERRUPTED, "SIGTERM was received", 0, 0, 3, signum=15),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_comes_back_as_it_was_written(record: object) -> None:
    text = encode(record)

    assert decode(type(record), text) == record
    assert "\n" not in text


def test_a_newer_writers_fields_are_ignored() -> None:
    text = json.dumps({**json.loads(encode(Joined("a", 1))), "colour": "red"})

    assert decode(Joined, text) == Joined("a", 1)


def test_a_whole_number_is_a_duration_too() -> None:
    text = encode(JobSpec("job", PROGRAM)).replace('"restart_window_s":null', '"restart_window_s":30')

    window_s = decode(JobSpec, text).restart_window_s

    assert window_s == 30.0
    assert isinstance(window_s, float)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "3",
        "[]",
        '"text"',
        "{}",
        '{"node_id":"a"}',
        '{"node_id":"a","port":"29500"}',
        '{"node_id":null,"port":1}',
        '{"node_id":["a"],"port":1}',
    ],
)
def test_what_is_no_record_is_refused_and_shown(text: str) -> None:
    with pytest.raises(ValueError, match="not a Joined: ") as caught:
        decode(Joined, text)

    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"kind":"module"', '"kind":"spell"'),
        ('"args":["--lr","0.1",""]', '"args":"--lr"'),
        ('"args":["--lr","0.1",""]', '"args":null'),
        ('"args":["--lr","0.1",""]', '"args":{"a":1}'),
        ('"args":["--lr","0.1",""]', '"args":["--lr",1]'),
    ],
)
def test_a_field_of_another_kind_is_refused(old: str, new: str) -> None:
    text = encode(PROGRAM)
    assert old in text

    with pytest.raises(ValueError, match="not a Program"):
        decode(Program, text.replace(old, new))


def test_a_torn_or_scribbled_record_is_read_or_refused_never_worse() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        record = rng.choice(RECORDS)
        text = encode(record)
        at = rng.randrange(len(text))

        for broken in (text[:at], text[:at] + rng.choice('{}[],:"0xn') + text[at + 1 :]):
            try:
                found = decode(type(record), broken)
            except ValueError:
                continue
            assert isinstance(found, type(record)), f"seed {seed}"
