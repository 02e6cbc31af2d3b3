"""rendezvous.codec: records as text, what is no record, and the longest form of a record."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from elaunch.rendezvous.codec import Limit, decode, encode, json_bytes, keep_ends, keep_line, keep_tail
from elaunch.rendezvous.rules.snapshot import encode_table, seats_of
from elaunch.rendezvous.types import (
    Failure,
    FailureKind,
    Generation,
    JobSpec,
    Joined,
    Node,
    OpenKind,
    Outcome,
    OutcomeKind,
    Program,
    ProgramKind,
    RankTable,
)

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
        *("", "{", "null", "3", "[]", '"text"', "{}"),
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


# One byte of JSON, two, six, six, twelve, and six without being text at all.
CHARACTERS = ["x", "\n", "\x01", "é", "😀", "\udc80"]
LONG = 3_000_000


def failure(text: str) -> Failure:
    return Failure(
        *(FailureKind.STORE_LOST, 10**9, text, text, 10**6, 10**6, 10**9, -(10**9), text),
        *(text, text, text, text, text, text, 1234567890.123456, None),
    )


@pytest.mark.parametrize("character", CHARACTERS)
def test_no_failure_record_is_longer_than_64_kb(character: str) -> None:
    longest = failure(character * LONG)

    assert 40_000 < len(encode(longest)) < 64 << 10
    assert longest.one_of(100) == longest
    assert len(encode(longest.one_of(1000))) < 20 << 10
    assert len(encode(longest.one_of(4096))) < 16 << 10
    assert len(encode(longest.opening)) < 13 << 10
    assert longest.is_cut


@pytest.mark.parametrize("character", CHARACTERS)
def test_the_other_records_have_a_longest_form_too(character: str) -> None:
    text = character * LONG
    seats = seats_of([("host-00000001", 1, "default")])
    program = Program(ProgramKind.SCRIPT, text, (text,))

    assert len(encode(Generation(1, OpenKind.FAIL, text, text))) < 2 << 10
    assert len(encode(Node(text, text, text, 1, text, text, 0, text))) < 3 << 10
    assert len(encode(JobSpec("job", program).terms)) < 1 << 10
    assert len(encode(Outcome(OutcomeKind.FAILED, text, 1, 1, 1, failure(text)))) < 64 << 10
    assert len(encode_table(RankTable(1, seats, text, 1, text))) < 6 << 10


def test_a_line_has_no_control_characters_and_that_alone_cuts_nothing() -> None:
    made = failure("a\nelaunch: b\x1b[2J\x9b\u202e\tc")

    assert made.message == made.exception == made.host == made.log_path == "a\\x0aelaunch: b\\x1b[2J\\x9b\\u202e\tc"
    assert "\n" in made.tail
    assert not made.is_cut
    assert decode(Failure, encode(made)) == made


def test_a_cut_traceback_shows_both_ends_in_whole_lines_and_how_much_is_missing() -> None:
    text = "".join(f"line {number:05}\n" for number in range(10_000))

    first, left_out, last = replace(failure(""), traceback=text).traceback.partition("… ")[0::1]

    missing = int(last.partition(" ")[0].replace(",", ""))
    end = last.partition("…\n")[2]
    assert left_out
    assert first.startswith("line 00000\nline 00001\n")
    assert text.startswith(first)
    assert end.endswith("line 09999\n")
    assert text.endswith(end)
    assert end.startswith("line ")
    assert missing == len(text) - len(first.removesuffix("\n")) - len(end)


def test_a_cut_output_begins_with_a_whole_line() -> None:
    tail = replace(failure(""), tail="".join(f"line {number}\n" for number in range(10_000))).tail

    assert tail.startswith("line ")
    assert tail.endswith("line 9999\n")


def test_a_long_output_alone_does_not_make_a_record_a_cut_one() -> None:
    """People read the last lines of the output: all that is about the failure is there."""
    assert not replace(failure(""), tail="x" * LONG).is_cut


@pytest.mark.parametrize("limit", [keep_line, keep_ends, keep_tail])
@pytest.mark.parametrize("character", CHARACTERS)
@pytest.mark.parametrize("bytes_max", [0, 1, 5, 6, 7, 12, 40, 60, 100, 1000])
def test_a_text_fits_once_it_was_cut_whatever_the_limit(limit: type[Limit], character: str, bytes_max: int) -> None:
    for text in (character * 2000, f"a{character}\n" * 700):
        cut = limit(bytes_max).of(text)  # type: ignore[call-arg]

        assert json_bytes(cut) <= bytes_max
        assert limit(bytes_max).of(cut) == cut  # type: ignore[call-arg]
