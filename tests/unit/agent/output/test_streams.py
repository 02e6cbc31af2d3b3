"""agent.output.streams: from a worker's pipe to whole lines, the console and the file, with real file descriptors."""

from __future__ import annotations

import os
import random
import re
import resource
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch.agent.diagnosis.exit_status import shows_only_lost_peer
from elaunch.agent.output.streams import (
    PARTIAL_LINE_WAIT_S,
    TAIL_BYTES_MAX,
    Console,
    LogFile,
    ShownTracebacks,
    TracebackFold,
    WorkerStream,
    prefixed,
)
from elaunch.lines import LINE_BYTES_MAX, split_lines, write_all
from tests.forked import Child
from tests.harness import DEADLINE_S


class Screen:
    """A console whose output can be read back, and the warnings that it gave."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self.warnings: list[str] = []
        self.console = Console(self._write_fd, lambda error: self.warnings.append(str(error)))

    def shown(self) -> bytes:
        try:
            return os.read(self._read_fd, 1 << 16)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        os.close(self._read_fd)
        os.close(self._write_fd)


@pytest.fixture
def screen() -> Iterator[Screen]:
    screen = Screen()
    yield screen
    screen.close()


def stream(
    console: Console | None,
    prefix: bytes = b"",
    *,
    local_rank: int = 0,
    file: LogFile | None = None,
    file_first: bool = False,
) -> WorkerStream:
    read_fd, write_fd = os.pipe()
    os.close(write_fd)
    return WorkerStream(read_fd, 0, local_rank, console, prefix, True, file=file, file_first=file_first)


def test_no_ranks_line_is_cut_by_anothers(screen: Screen) -> None:
    rank_0, rank_1 = stream(screen.console, b"[0] "), stream(screen.console, b"[1] ", local_rank=1)

    rank_0.feed(b"hel", now_s=1.0)
    rank_1.feed(b"other\n", now_s=1.0)
    rank_0.feed(b"lo\n", now_s=1.0)

    assert screen.shown() == b"[1] other\n[0] hello\n"


def test_a_partial_line_is_shown_after_a_moment_and_goes_on_without_a_second_prefix(screen: Screen) -> None:
    rank_0 = stream(screen.console, b"[0] ")
    rank_0.feed(b"load", now_s=5.0)

    before, due_s = screen.shown(), rank_0.flush_at_s
    rank_0.flush(20.0)
    after = screen.shown()
    rank_0.feed(b"ing\n", now_s=6.0)

    assert (before, due_s) == (b"", 5.0 + PARTIAL_LINE_WAIT_S)
    assert after == b"[0] load"
    assert screen.shown() == b"ing\n"


def test_a_line_left_open_is_ended_before_another_rank_writes(screen: Screen) -> None:
    rank_0, rank_1 = stream(screen.console, b"[0] "), stream(screen.console, b"[1] ", local_rank=1)
    rank_0.feed(b"load", now_s=1.0)
    rank_0.flush(20.0)

    rank_1.feed(b"hi\n", now_s=1.0)
    rank_0.feed(b"ing\n", now_s=1.0)

    assert screen.shown() == b"[0] load\n[1] hi\n[0] ing\n"


def test_a_redirected_stream_is_on_the_console_only_from_where_its_file_takes_no_more(
    screen: Screen, tmp_path: Path
) -> None:
    path = tmp_path / "stdout.log"
    ours, theirs = os.pipe()

    def writes() -> None:
        # The limit is a process's own; a file that is cut at 10 bytes stands for a disk that is full.
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
        file = LogFile(str(path), lambda warning: None)
        rank_0 = stream(screen.console, b"[0] ", file=file, file_first=True)
        rank_0.feed(b"one\n", now_s=1.0)
        os.write(theirs, b"before: " + screen.shown())
        for piece in (b"two\nthree\n", b"four\n"):
            rank_0.feed(piece, now_s=1.0)
        rank_0.close()
        os.write(theirs, b"; after: " + screen.shown())

    with Child(writes) as child:
        os.close(theirs)
        assert child.end() == 0
    with os.fdopen(ours, "rb") as pipe:
        shown = pipe.read()

    assert shown == b"before: ; after: [0] ree\n[0] four\n"
    assert path.read_bytes() == b"one\ntwo\nth"


@pytest.mark.parametrize("path", ["/dev/full", ""])
def test_a_redirected_stream_without_a_file_that_can_be_written_is_on_the_console(path: str, screen: Screen) -> None:
    file = LogFile(path, screen.warnings.append) if path else None
    rank_0 = stream(screen.console, b"[0] ", file=file, file_first=True)

    rank_0.feed(b"one\n", now_s=1.0)
    rank_0.close()

    assert screen.shown() == b"[0] one\n"


def test_a_full_file_replaces_an_older_one_and_the_new_ones_first_line_counts_the_dropped_bytes(tmp_path: Path) -> None:
    path, older, warned = tmp_path / "stdout.log", tmp_path / "stdout.log.1", list[str]()
    file = LogFile(str(path), warned.append, bytes_max=4096)
    lines = [b"line %d %b\n" % (number, b"x" * (number % 37)) for number in range(2000)]
    notice = rb"elaunch: older output is in stdout.log.1; ([\d,]+) bytes before that were dropped \(--log-max-size\)\n"
    most = 0

    for line in lines:
        assert file.write(line) == b""
        most = max(most, path.stat().st_size + (older.stat().st_size if older.exists() else 0))

    notices = [re.match(notice, each.read_bytes()) for each in (older, path)]
    (_, of_older), (dropped, of_new) = [(int(found[1].replace(b",", b"")), found.end()) for found in notices if found]
    kept = older.read_bytes()[of_older:] + path.read_bytes()[of_new:]
    written = b"".join(lines)
    assert written.endswith(kept)
    assert 2000 < len(kept) < most <= 4096
    assert len(written) - len(kept) == dropped
    assert (warned, sorted(tmp_path.iterdir())) == ([], [path, older])


def test_a_file_with_a_limit_that_cannot_be_replaced_takes_no_more_after_one_warning(tmp_path: Path) -> None:
    path, warned = tmp_path / "stdout.log", list[str]()
    file = LogFile(str(path), warned.append, bytes_max=20)
    file.write(b"one\n" * 4)
    path.unlink()

    left = [file.write(b"two\n" * 2) for _ in range(2)]

    assert left == [b"two\n" * 2] * 2
    assert warned == [f"{path} cannot be written (No such file or directory); training continues without this log file"]


def test_only_the_end_is_kept_and_it_has_a_bound() -> None:
    chatty = stream(None)

    for n in range(20_000):
        chatty.feed(b"line %06d\n" % n, now_s=1.0)

    assert len(chatty.tail()) == TAIL_BYTES_MAX
    assert chatty.tail().endswith("line 019998\nline 019999\n")


def test_a_write_to_a_slow_reader_waits_and_loses_nothing() -> None:
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    data = bytes(range(256)) * 1024
    got = bytearray()

    def writes() -> None:
        os.close(read_fd)
        write_all(write_fd, data)

    with Child(writes) as child:
        os.close(write_fd)
        while select.select([read_fd], [], [], DEADLINE_S)[0] and (piece := os.read(read_fd, 5000)):
            got += piece
        os.close(read_fd)

        assert child.end() == 0
    assert bytes(got) == data


PREFIX = b"[7] "
LINE_END = re.compile(rb"\r\n|\n|\r")


def random_bytes(rng: random.Random) -> bytes:
    return b"".join(
        rng.choice([b"a", b"bc", b"\n", b"\r", b"\r\n", b"", "é".encode()]) for _ in range(rng.randrange(40))
    )


def random_pieces(rng: random.Random, data: bytes) -> list[bytes]:
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(8)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def test_what_comes_out_is_joined_what_went_in() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        data = random_bytes(rng)
        out, rest = [], b""

        for piece in random_pieces(rng, data):
            whole, rest = split_lines(rest + piece)
            out.append(whole)

        assert b"".join(out) + rest == data, f"seed {seed}"
        assert all(not run or run.endswith((b"\n", b"\r")) for run in out), f"seed {seed}: {out}"
        assert not LINE_END.search(rest[:-1]), f"seed {seed}: a whole line was left waiting: {rest!r}"


def test_a_carriage_return_and_newline_are_never_torn_apart() -> None:
    assert split_lines(b"one\r") == (b"", b"one\r")
    assert split_lines(b"one\r\ntwo") == (b"one\r\n", b"two")


def test_a_line_that_never_ends_is_passed_on_in_pieces() -> None:
    line = b"x" * LINE_BYTES_MAX

    assert split_lines(line) == (b"", line)
    assert split_lines(line + b"y") == (line + b"y", b"")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (b"one\n", b"[7] one\n"),
        (b"one\ntwo\n", b"[7] one\n[7] two\n"),
        (b"one\ntw", b"[7] one\n[7] tw"),
        (b"\n\n", b"[7] \n[7] \n"),
        (b"10%\r20%\r", b"[7] 10%\r[7] 20%\r"),
        (b"one\r\ntwo\r\n", b"[7] one\r\n[7] two\r\n"),
        (b"10%\rdone\r\n", b"[7] 10%\r[7] done\r\n"),
        (b"a\rb", b"[7] a\r[7] b"),
        # After what erases the last state of a progress bar.
        (b"\r\x1b[2K10%", b"[7] \r\x1b[2K[7] 10%"),
        (b"a\n\x1b[1A\x1b[2Kb\n", b"[7] a\n\x1b[1A\x1b[2K[7] b\n"),
        (b"\x1b[?25l", b"\x1b[?25l"),
        (b"\x1b[?25l10%", b"\x1b[?25l[7] 10%"),
        (b"end\n\x1b[?25h", b"[7] end\n\x1b[?25h"),
        (b"\x1b[31mred\x1b[0m\n", b"[7] \x1b[31mred\x1b[0m\n"),
    ],
)
def test_each_line_gets_its_prefix(lines: bytes, expected: bytes) -> None:
    assert prefixed(lines, PREFIX, continued=False) == expected


def test_there_is_one_prefix_at_each_lines_start_and_nowhere_else() -> None:
    for seed in range(300):
        data = random_bytes(random.Random(seed)) or b"\n"

        out = prefixed(data, PREFIX, continued=False)

        assert out.replace(PREFIX, b"") == data, f"seed {seed}"
        lines = [line for line in re.split(rb"(?<=\n)|(?<=\r)(?!\n)", out) if line]
        assert all(line.startswith(PREFIX) and line.count(PREFIX) == 1 for line in lines), f"seed {seed}: {out!r}"


HEAD = b"[rank0]: Traceback (most recent call last):\n"
FRAME = b'[rank0]:   File "train.py", line 7, in <module>\n[rank0]:     dist.all_reduce(x)\n'
LOST = b"[rank0]: RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:49831.\n"
OWN = b"[rank0]: ValueError: bad batch\n"
ALL = HEAD + FRAME + LOST


@pytest.fixture
def fold() -> TracebackFold:
    return TracebackFold(shows_only_lost_peer)


def test_of_a_rank_that_is_killed_while_it_prints_the_known_traceback_one_line_is_shown() -> None:
    shown = ShownTracebacks()
    whole = b'Traceback (most recent call last):\n  File "t.py", line 1\nValueError: bad\n'

    assert shown.once(whole, 0, 0) == whole
    assert shown.once(whole[:35], 1, 1) == (
        b"elaunch: rank 1: the beginning of the same traceback as rank 0 in generation 0\n"
    )
    assert shown.once(b"Traceback: another\n", 1, 2) == b"Traceback: another\n"


def test_a_traceback_of_a_lost_peer_is_not_shown_if_the_worker_ends(fold: TracebackFold) -> None:
    shown = fold.take(b"step 3\n" + HEAD, 1.0) + fold.take(FRAME + LOST, 1.01)
    flushed = fold.flush(1.1)

    assert shown == b"step 3\n"
    assert flushed == fold.end() == b""


def test_it_is_shown_if_the_program_goes_on(fold: TracebackFold) -> None:
    fold.take(ALL, 1.0)
    assert fold.flush(1.1) == b""
    assert fold.due_s == 6.0

    assert fold.take(b"trying again\n", 3.0) == b""
    assert fold.flush(6.0) == ALL + b"trying again\n"
    assert fold.take(b"step 4\n", 6.1) == b"step 4\n"
    assert fold.due_s is None


def test_any_other_traceback_is_shown_after_a_moment(fold: TracebackFold) -> None:
    assert fold.take(HEAD + FRAME + OWN, 1.0) == b""

    assert fold.due_s == 1.1
    assert fold.flush(1.1) == HEAD + FRAME + OWN
    assert fold.due_s is None


def test_a_traceback_is_not_judged_before_its_last_line_is_there(fold: TracebackFold) -> None:
    fold.take(HEAD + FRAME, 1.0)
    early = fold.flush(1.1)
    fold.take(LOST, 1.5)

    assert early == b""
    assert fold.flush(1.6) == fold.end() == b""


def test_the_last_exception_of_a_chain_decides(fold: TracebackFold) -> None:
    chain = ALL + b"\nDuring handling of the above exception, another exception occurred:\n\n" + HEAD + FRAME + OWN
    fold.take(chain, 1.0)

    assert fold.end() == chain


def test_what_is_held_has_a_bound(fold: TracebackFold) -> None:
    fold.take(HEAD, 1.0)
    much = b"x" * 1023 + b"\n"

    shown = b"".join(fold.take(much, 1.0) for _ in range(300))

    assert shown.startswith(HEAD)
    assert len(shown) > 256 << 10
