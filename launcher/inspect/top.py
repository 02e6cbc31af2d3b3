"""`elaunch top`: the status of a job, refreshed each second until q, Ctrl-C, or the job's end."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click
from rich.live import Live
from rich.text import Text

from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.inspect.commands import RANKS, job_command
from elaunch.launcher.inspect.job_source import JobOver, JobSource
from elaunch.launcher.inspect.status import headline, status_record, text_of
from elaunch.rendezvous.format import plain
from elaunch.rendezvous.rules.queries import RESPONSES_PER_S

REFRESH_S = 1.0
_OVER = ("ended", "gone")


def _main(ctx: click.Context, source: JobSource) -> int:
    """Show the job until it ends or the user leaves. Raises SiteError at the first query only."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("top needs a terminal; elaunch status shows the job once, and its --json is for scripts")
    record = status_record(source.take(), time.time())
    trouble = over = ""
    with _terminal() as is_over, Live(screen=True, auto_refresh=False, redirect_stderr=False) as live:
        while True:
            text = screen(record, trouble, live.console.size.height, every_rank=ctx.params["ranks"])
            live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
            # The nodes of a large job take turns, so it is queried less often.
            if record["state"] in _OVER or is_over(max(REFRESH_S, 2 * len(record["nodes"]) / RESPONSES_PER_S)):
                break
            try:
                record, trouble = status_record(source.take(), time.time()), ""
            except JobOver as error:
                over = str(error)
                break
            except SiteError as error:
                # The store may be available again soon. The last status stays on the screen.
                trouble = str(error)
    if record["state"] in _OVER or over:
        print(plain(over) or headline(record))
    return 0


TOP = job_command(
    "top",
    [RANKS],
    "Show how a running job is doing, refreshed each second. q or Ctrl-C ends the view, not the job.",
    _main,
)


def screen(record: dict[str, Any], trouble: str, height: int, *, every_rank: bool) -> str:
    """The status in `height` lines; what does not fit is counted."""
    lines = text_of(record, every_rank=every_rank).splitlines()
    last = [f"no answer: {plain(trouble)}"] if trouble else []
    last.append(time.strftime("%H:%M:%S") + "  q quits")
    limit = max(height - len(last) - 1, 1)
    if len(lines) > limit:
        lines = [*lines[: limit - 1], f"… {len(lines) - limit + 1} more lines"]
    return "\n".join([*lines, "", *last])


@contextmanager
def _terminal() -> Iterator[Callable[[float], bool]]:
    """Yields a function that waits so many seconds for a key, and returns whether it is q.

    SIGTERM and SIGHUP end the command as Ctrl-C does, with the terminal restored.
    """
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def end(signum: int, _frame: object) -> None:
        raise SystemExit(128 + signum)

    def typed_q(seconds: float) -> bool:
        is_typed = bool(select.select([fd], [], [], seconds)[0])
        return is_typed and os.read(fd, 64).lower() in (b"", b"q")

    handlers = {signum: signal.signal(signum, end) for signum in (signal.SIGTERM, signal.SIGHUP)}
    try:
        tty.setcbreak(fd)
        yield typed_q
    finally:
        # After a SIGHUP the terminal may be closed.
        with suppress(termios.error):
            termios.tcsetattr(fd, termios.TCSADRAIN, before)
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
