"""`elaunch top`: the status of a job, drawn anew each second until q, Ctrl-C, or the job's end."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from elaunch.launcher.errors import SiteError
from elaunch.launcher.watch.record import status_record
from elaunch.launcher.watch.source import JobOver, JobSource
from elaunch.launcher.watch.words import facts_of, headline, one_line, remarks, rows_of
from elaunch.rendezvous.rules.questions import ANSWERS_PER_S
from elaunch.rendezvous.texts import plain

REFRESH_S = 1.0
# Lines of the screen that are not the table's rows: head, blank lines, the last line.
_FRAME_LINES = 4
_OVER = ("ended", "gone")


def watch(source: JobSource, *, every_rank: bool) -> int:
    """Show the job until it ends or the user leaves. Returns the exit code. Raises SiteError at the first look only."""
    record = _look(source)
    if not sys.stdout.isatty():
        return _lines(source, record)
    console = Console(highlight=False, soft_wrap=False)
    trouble = over = ""
    with (
        _signals_end_it(),
        _keys() as is_over,
        Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live,
    ):
        while True:
            live.update(screen(record, trouble, console.size.height, every_rank=every_rank), refresh=True)
            if record["state"] in _OVER or is_over(_pause_s(record)):
                break
            try:
                record, trouble = _look(source), ""
            except JobOver as error:
                over = str(error)
                break
            except SiteError as error:
                # The store may be back in a moment. The last answer stays on the screen.
                trouble = str(error)
    if record["state"] in _OVER or over:
        print(plain(over) or headline(record))
    return 0


def screen(record: dict[str, Any], trouble: str, height: int, *, every_rank: bool) -> RenderableType:
    """One screen of `height` lines."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="ellipsis", no_wrap=True)
    said = facts_of(record)
    for label, text in said:
        facts.add_row(Text(label), Text(text))
    parts: list[RenderableType] = [Text(headline(record), style="bold"), facts, Text("")]
    notes = [*remarks(record), *([f"no answer: {trouble}"] if trouble else [])]
    room = max(1, height - len(said) - len(notes) - _FRAME_LINES)
    if rows := rows_of(record, every_rank=every_rank):
        parts.append(_table(rows[0], rows[1:], room))
    parts += [Text(plain(note), style="yellow", no_wrap=True, overflow="ellipsis") for note in notes]
    parts.append(Text(time.strftime("%H:%M:%S") + "  q ends this", style="dim"))
    return Group(*parts)


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]], room: int) -> Table:
    """As many rows as there is room for; the last one says how many are left out."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for head in heads:
        table.add_column(Text(head), no_wrap=True, overflow="ellipsis")
    is_cut = len(rows) > room - 1
    for row in rows[: max(0, room - 2)] if is_cut else rows:
        table.add_row(*map(Text, row))
    if is_cut:
        table.add_row(Text(f"… {len(rows) - max(0, room - 2)} more"))
    return table


def _look(source: JobSource) -> dict[str, Any]:
    return status_record(source.take(), time.time())


def _pause_s(record: dict[str, Any]) -> float:
    """The nodes of a large job answer in turns, so it is asked less often."""
    return max(REFRESH_S, 2 * len(record["nodes"]) / ANSWERS_PER_S)


def _lines(source: JobSource, record: dict[str, Any]) -> int:
    """For a pipe or a file: one line a second."""
    while True:
        try:
            print(one_line(record), flush=True)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 0
        if record["state"] in _OVER:
            return 0
        time.sleep(_pause_s(record))
        try:
            record = _look(source)
        except JobOver as error:
            print(plain(str(error)))
            return 0
        except SiteError as error:
            print(plain(f"elaunch: {error}"), file=sys.stderr)
            return 3


@contextmanager
def _signals_end_it() -> Iterator[None]:
    """End by SIGTERM and SIGHUP as by Ctrl-C, with the terminal as it was before."""

    def end(signum: int, _frame: object) -> None:
        raise SystemExit(128 + signum)

    before = {signum: signal.signal(signum, end) for signum in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def _keys() -> Iterator[Any]:
    """A function that waits so many seconds, and says whether the user typed q meanwhile."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        _disable_suspend(fd)
        yield lambda seconds: _typed_q(fd, seconds)
    finally:
        # After a SIGHUP the terminal may be gone.
        with suppress(termios.error):
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _disable_suspend(fd: int) -> None:
    """Ctrl-Z would give the shell back with this screen on it."""
    modes = termios.tcgetattr(fd)
    modes[6][termios.VSUSP] = os.fpathconf(fd, "PC_VDISABLE").to_bytes(1, "little")
    termios.tcsetattr(fd, termios.TCSADRAIN, modes)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _typed_q(fd: int, seconds: float) -> bool:
    end_s = time.monotonic() + seconds
    while (left_s := end_s - time.monotonic()) > 0:
        if select.select([fd], [], [], left_s)[0] and (not (typed := os.read(fd, 64)) or b"q" in typed.lower()):
            return True
    return False
