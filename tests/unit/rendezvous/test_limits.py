"""rendezvous.codec: whatever a program says, a record has a longest form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaunch.rendezvous.codec import Limit, decode, encode, json_bytes, keep_ends, keep_line, keep_tail
from elaunch.rendezvous.job_spec import JobSpec, Program, ProgramKind
from elaunch.rendezvous.rules.snapshot import encode_table, seats_of
from elaunch.rendezvous.types import Failure, FailureKind, Generation, Node, OpenKind, Outcome, OutcomeKind, RankTable

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
    said = failure("a\nelaunch: b\x1b[2J\x9b\u202e\tc")

    assert said.message == said.exception == said.host == said.log_path == "a\\x0aelaunch: b\\x1b[2J\\x9b\\u202e\tc"
    assert "\n" in said.tail
    assert not said.is_cut
    assert decode(Failure, encode(said)) == said


def test_a_cut_traceback_shows_both_ends_in_whole_lines_and_how_much_is_missing() -> None:
    text = "".join(f"line {number:05}\n" for number in range(10_000))

    first, said, last = replace(failure(""), traceback=text).traceback.partition("… ")[0::1]

    missing = int(last.partition(" ")[0].replace(",", ""))
    end = last.partition("…\n")[2]
    assert said
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
