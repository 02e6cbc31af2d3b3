"""agent.output.streams: from a worker's pipe to the console and the file, with real file descriptors."""

from __future__ import annotations

import os
import resource
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch.agent.output.streams import (
    PARTIAL_LINE_WAIT_S,
    TAIL_BYTES_MAX,
    Console,
    LogFile,
    WorkerStream,
    write_all,
)
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
        for fd in (self._read_fd, self._write_fd):
            if fd >= 0:
                os.close(fd)


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
    keep_tail: bool = True,
    file: LogFile | None = None,
    file_first: bool = False,
) -> WorkerStream:
    read_fd, write_fd = os.pipe()
    os.close(write_fd)
    return WorkerStream(read_fd, 0, local_rank, console, prefix, keep_tail, file=file, file_first=file_first)


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
        said = pipe.read()

    assert said == b"before: ; after: [0] ree\n[0] four\n"
    assert path.read_bytes() == b"one\ntwo\nth"


@pytest.mark.parametrize("path", ["/dev/full", ""])
def test_a_redirected_stream_without_a_file_that_can_be_written_is_on_the_console(path: str, screen: Screen) -> None:
    file = LogFile(path, screen.warnings.append) if path else None
    rank_0 = stream(screen.console, b"[0] ", file=file, file_first=True)

    rank_0.feed(b"one\n", now_s=1.0)
    rank_0.close()

    assert screen.shown() == b"[0] one\n"


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
