"""agent.output.live_rows: progress bars of ranks that share a terminal, on a real terminal's screen (pyte)."""

from __future__ import annotations

import random

import pyte
import pytest

from elaunch.agent.output.live_rows import LiveRows

COLUMNS, ROWS = 40, 12
HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"
# As rich goes back to the first of two rows.
BACK = b"\r\x1b[2K\x1b[1A\x1b[2K"


class Screen:
    """A terminal that shows what several ranks write, and keeps what has scrolled away."""

    def __init__(self) -> None:
        self.rows = LiveRows(lambda: (COLUMNS, ROWS))
        self._screen = pyte.HistoryScreen(COLUMNS, ROWS, history=10_000)
        self._stream = pyte.ByteStream(self._screen)

    def write(self, rank: int | None, *pieces: bytes) -> None:
        for piece in pieces:
            sent = self.rows.put(piece, rank, b"" if rank is None else b"[%d] " % rank)
            self._show(sent)

    def leave(self, rank: int) -> None:
        self._show(self.rows.leave(rank))

    def _show(self, sent: bytes) -> None:
        # A terminal's own line discipline does so.
        self._stream.feed(sent.replace(b"\n", b"\r\n"))

    @property
    def lines(self) -> list[str]:
        gone = ["".join(row[column].data for column in range(COLUMNS)) for row in self._screen.history.top]
        lines = [line.rstrip() for line in (*gone, *self._screen.display)]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    @property
    def has_cursor(self) -> bool:
        return not self._screen.cursor.hidden


def test_lines_of_others_go_above_a_bar() -> None:
    screen = Screen()

    screen.write(0, b"\r10%")
    screen.write(1, b"hello\n")
    screen.write(0, b"\r20%")
    screen.write(None, b"elaunch: said\n")
    screen.write(0, b"\r30%")

    assert screen.lines == ["[1] hello", "elaunch: said", "[0] 30%"]


def test_a_row_that_outgrows_the_screen_is_written_once() -> None:
    """A program that prints dots without an end of the line, after a bar."""
    screen = Screen()

    screen.write(0, b"\r", *(b"." * COLUMNS for _ in range(2 * ROWS)))
    screen.write(1, b"hello\n", b"again\n")

    shown = "".join(screen.lines)
    assert shown.count(".") == 2 * ROWS * COLUMNS
    assert screen.lines[-2:] == ["[1] hello", "[1] again"]


def test_a_bar_that_ends_stays_as_a_line() -> None:
    screen = Screen()

    screen.write(0, b"\r10%", b"\r100%\n")
    screen.write(1, b"hello\n")
    screen.write(0, b"next\n")

    assert screen.lines == ["[0] 100%", "[1] hello", "[0] next"]


def test_rows_to_which_a_rank_moves_back_take_no_line_of_another_with_them() -> None:
    screen = Screen()

    screen.write(0, HIDE, b"epoch 1\nstep 1")
    screen.write(1, b"hello\n")
    screen.write(0, BACK + b"epoch 1\nstep 2")
    screen.write(1, b"again\n", b"and again\n")
    screen.write(0, BACK + b"epoch 1\nstep 3", b"\n" + SHOW)
    screen.write(1, b"end\n")

    assert screen.lines == ["[1] hello", "[1] again", "[1] and again", "[0] epoch 1", "[0] step 3", "[1] end"]
    assert screen.has_cursor


def test_what_a_rank_prints_above_its_own_rows_stays() -> None:
    screen = Screen()

    screen.write(0, HIDE, b"step 1")
    screen.write(0, b"\r\x1b[2Kprinted\n", b"step 2")
    screen.write(1, b"hello\n")
    screen.write(0, b"\r\x1b[2Kstep 3", b"\n" + SHOW)

    assert sorted(screen.lines) == ["[0] printed", "[0] step 3", "[1] hello"]
    assert screen.lines[-1] == "[0] step 3"


def test_bars_of_two_ranks_take_turns_in_one_place() -> None:
    screen = Screen()

    for percent in range(0, 100, 10):
        screen.write(0, b"\r%d%%" % percent)
        screen.write(1, b"\r%d%%" % (percent + 1))
    assert screen.lines == ["[1] 91%"]

    screen.write(1, b"\rdone\n")
    assert screen.lines == ["[1] done", "[0] 90%"]

    screen.write(0, b"\rdone\n")
    assert screen.lines == ["[1] done", "[0] done"]


def test_a_prompt_stays_where_it_is() -> None:
    screen = Screen()

    screen.write(0, b"\r10%")
    screen.write(1, b"(Pdb) ")
    screen.write(0, b"\r20%")

    assert screen.lines == ["[1] (Pdb)", "[0] 20%"]


def test_a_bar_that_is_wider_than_the_terminal_is_erased_whole() -> None:
    screen = Screen()

    screen.write(0, b"\r" + b"x" * (2 * COLUMNS))
    screen.write(1, b"hello\n")
    screen.write(0, b"\n")

    assert screen.lines[0] == "[1] hello"
    assert "".join(screen.lines[1:]) == "[0] " + "x" * (2 * COLUMNS)


def test_the_end_of_a_rank_with_a_bar_shows_the_cursor_and_ends_the_line() -> None:
    screen = Screen()

    screen.write(0, HIDE, b"step 1")
    screen.leave(0)
    screen.write(None, b"elaunch: rank 0 was killed\n")

    assert screen.lines == ["[0] step 1", "elaunch: rank 0 was killed"]
    assert screen.has_cursor


@pytest.mark.parametrize("seed", range(100))
def test_no_line_is_lost_or_mangled_whatever_bars_move(seed: int) -> None:
    rng = random.Random(seed)
    screen = Screen()
    said: list[str] = []
    rows = {rank: rng.choice([0, 1, 2, 3]) for rank in range(3)}
    for rank, count in rows.items():
        if count > 1:
            screen.write(rank, HIDE, b"\n".join(b"row" for _ in range(count)))
    for number in range(60):
        rank = rng.randrange(3)
        if rows[rank] and rng.random() < 0.7:
            back = b"\r" + b"\x1b[2K\x1b[1A" * (rows[rank] - 1) + b"\x1b[2K"
            screen.write(rank, back + b"\n".join(b"row %d" % number for _ in range(rows[rank])))
        elif not rows[rank]:
            screen.write(rank, b"line %d\n" % number)
            said.append(f"[{rank}] line {number}")

    assert [line for line in screen.lines if "line" in line] == said, f"seed {seed}"
