"""What workers and their processes write: on links, in error files, at the end of their output."""

from __future__ import annotations

import json
import socket

from hypothesis import example, given
from hypothesis import strategies as st

from elaunch.agent.diagnosis import exit_status
from elaunch.agent.diagnosis.causes.cause import Facts, Space
from elaunch.agent.diagnosis.causes.table import explained, needs_disks
from elaunch.agent.diagnosis.exit_status import (
    Remains,
    chain_start,
    failure_of,
    parse_record,
    parse_traceback,
    with_tail,
)
from elaunch.agent.workers.link import Link
from elaunch.agent.workers.observers import _last_report
from elaunch.launcher.report import report
from elaunch.rendezvous.codec import decode, encode
from elaunch.rendezvous.types import Failure, FailureKind, JobSpec, Outcome, OutcomeKind, Program, ProgramKind
from elaunch.trainer.link import _Link as WorkersLink
from tests.fuzzing import EXAMPLES, NESTED, PLAIN, TEXTS, VALUES, bounded

EVENTS = ("progress", "phase", "listens", "saving", "saved", "stopped", "note", "ended", "peer_failed", "stacks", "?")
NAMES = ("step", "total", "name", "stop", "peer_failed", "text", "raised", "reached_store", "reason", "generation")
MESSAGES = (
    st.builds(
        lambda event, fields: json.dumps({"event": event, **fields}).encode(),
        st.sampled_from(EVENTS) | PLAIN,
        st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4),
    )
    | VALUES.map(lambda value: json.dumps(value).encode())
    | st.sampled_from([NESTED[:50_000].encode(), b"", b"\xff", b"{}", b'{"event":"progress","step":NaN}'])
    | st.binary(max_size=60)
)
GOOD = b'\n{"event":"progress","step":41}\n'


def read_all(link: Link, end: socket.socket, data: bytes) -> None:
    """Have `link` read all that is sent, a socket's room at a time."""
    end.setblocking(False)
    while data:
        try:
            data = data[end.send(data) :]
        except BlockingIOError:
            link.read()
    while link.read() and has_more(link.socket):
        pass


def has_more(end: socket.socket) -> bool:
    try:
        return bool(end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return False


@given(st.lists(MESSAGES, max_size=4))
@example([NESTED.encode()])
@example([b"x" * 300_000])
def test_an_agent_still_reads_a_worker_whatever_that_sent_before(sent: list[bytes]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        link = Link(3, 1, ours)
        with bounded():
            read_all(link, theirs, b"\n".join(sent) + GOOD)
            sentence = _last_report(link)
        assert link.step == 41
        assert -1 <= link.step < 2**63
        # All of this goes to the log, the timeline and the store.
        for text in (*(message for message in link.messages if isinstance(message, str)), sentence):
            assert len(text.encode()) < 100_000


@given(st.lists(MESSAGES, max_size=4))
@example([NESTED.encode()])
def test_a_worker_still_reads_its_agent_whatever_that_sent_before(sent: list[bytes]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall((b"\n".join(sent) + GOOD)[-100_000:])
        theirs.close()
        with bounded():
            received = list(WorkersLink(ours)._messages())
    assert received[-1] == {"event": "progress", "step": 41}


PIECES = st.sampled_from(
    [
        "Traceback (most recent call last):\n", '  File "a.py", line 3, in f\n', '  File "', '", line ', "    x = 1\n",
        "ValueError: x", "SyntaxError: bad\n", "\n",
        "During handling of the above exception, another exception occurred:\n\n",
        "  + Exception Group Traceback (most recent call last):\n", "  | ", "[rank0]: ", "peer ", " disconnected", " ",
        "python: Error while finding module specification for ", "x: No module named ", "connection ", "broken pipe",
        "timed out waiting ", "9" * 30, "timed out waiting 9ms for ", "[a:1] ", "_", "\r", "a", ":", "\ud800", "\0",
    ]
)  # fmt: skip
PRINTED = st.lists(PIECES, max_size=12).map("".join) | TEXTS
# A worker's output may be as long as it likes; here less, as long as the time for it is short too.
SIZE = 1_000_000 if EXAMPLES else 100_000
GROUP = "  + Exception Group Traceback (most recent call last):\n"
CHAINED = "Traceback (most recent call last):\nDuring handling of the above exception, another exception occurred:\n\n"


def grown(text: str) -> str:
    """`text` again and again."""
    return (text * (SIZE // max(len(text), 1)))[:SIZE]


ERROR_RECORDS = (
    st.builds(lambda m, s: json.dumps({"message": {"message": m, "extraInfo": {"py_callstack": s}}}), PRINTED, PRINTED)
    | st.builds(lambda m, s: json.dumps({"message": {"message": m, "extraInfo": s}}), VALUES, VALUES)
    | VALUES.map(lambda value: json.dumps({"message": value}))
    | st.sampled_from([NESTED, '{"message":' * 900 + "1" + "}" * 900, "", "7"])
    | TEXTS
)
FACTS = Facts(Space("/dev/shm", 1, 0), (Space("/", 0, 0),), gpu_errors=("Xid (0): 79",))
WORKER = Failure(FailureKind.EXIT_CODE, 1, "a-1", "a", 0, 0, 17, None, "", failed_at=1e9)
HEAD = 'Traceback (most recent call last):\n  File "a", line 1, in f\n'
SPEC = JobSpec("job", Program(ProgramKind.SCRIPT, "train.py"))


def failure_by(record: str, tail: str, code: int) -> Failure:
    """The failure record of what a worker left behind, after every step that is done with it."""
    raised = code < 0 and code not in exit_status.CRASH_CODES
    failure = failure_of(WORKER, Remains(code, record, tail, crash=record, raised=raised), "SIGKILL")
    failure = explained(with_tail(failure, tail), FACTS)
    assert needs_disks(failure) is not None
    outcome = Outcome(OutcomeKind.FAILED, "it failed", 1, 0, 0, failure)
    assert report(outcome, SPEC, None).encode(errors="backslashreplace")
    return failure


@given(ERROR_RECORDS, PRINTED, st.sampled_from([1, 2, 127, -6, -9, -64]))
def test_whatever_a_worker_leaves_is_a_failure_that_can_be_read(record: str, tail: str, code: int) -> None:
    with bounded():
        failure = failure_by(record, tail, code)

    assert decode(Failure, encode(failure)) == failure


@given(st.builds(lambda text, more: grown(text) + more, PRINTED, PRINTED))
@example("x: Error while finding module specification for " + grown(" ") + "x")
@example(grown("peer "))
@example(grown("  | ") + GROUP)
@example("\n".join("  | " * depth + GROUP for depth in range(400)))
@example(grown(CHAINED))
@example(grown('  File "a", line 1\n'))
@example(grown('  File "'))
@example(
    "Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n" + grown('  File "a", line 1 in f\n')
)
@example("Fatal Python error: Aborted\n" + grown("Current thread 0x1"))
@example(HEAD + "OSError: " + grown("[Errno 28] x: '"))
@example(HEAD + "RuntimeError: " + grown("DataLoader worker (pid(s) 1, "))
@example(grown("terminate called after throwing an instance of '"))
@example(grown("    \n"))
@example(grown("[rank"))
@example("[" + grown(":1"))
def test_a_megabyte_of_output_is_parsed_in_a_moment(text: str) -> None:
    with bounded(cpu_s=5.0 if EXAMPLES else 1.0):
        parse_traceback(text)
        chain_start(text)
        failure_by(json.dumps({"message": {"message": "", "extraInfo": {"py_callstack": text}}}), text, 1)
        failure_by(text, text, -6)
        parse_record(json.dumps({"message": {"message": text, "extraInfo": {"py_callstack": text}}}))
