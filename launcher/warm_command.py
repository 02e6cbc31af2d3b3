"""`elaunch warm`: shows the fork servers that stayed for the next start, or ends them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from elaunch.agent.forkserver.client import Cold, connected, servers, stop
from elaunch.launcher.errors import SiteError
from elaunch.launcher.options.command_line import Command, own

_NONE = "no fork server stays; elaunch --warm script.py leaves one"


def _main(ctx: click.Context) -> int:
    """Run the command. Returns the exit code. Raises SiteError."""
    try:
        paths = servers()
        if ctx.params["stop"]:
            ended = [path for path in paths if stop(path)]
            print(f"ended: {len(ended)} fork server{'s' * (len(ended) != 1)}" if ended else _NONE)
            return 0
    except Cold as error:
        if str(error):
            raise SiteError(str(error)) from error
        paths = []
    texts, code = list[str](), 0
    for path in paths:
        try:
            with connected(path) as (_, handshake):
                texts.append(_text(path, handshake))
        except Cold as error:
            texts.append(str(error) or "it has ended")
            code = 3
    print("\n".join(texts) or _NONE)
    return code


COMMAND = Command(
    "warm",
    _main,
    [own("stop", "", "end these fork servers")],
    usage=["[--stop]"],
    about="Show this user's fork servers. They stay when a job with --warm has ended: the next start needs no import.",
    ending="Exit codes: 0 done, 2 the command line is wrong, 3 a fork server cannot be reached or ended.",
)


def _text(path: Path, record: dict[str, Any]) -> str:
    """Some lines about a fork server, by its handshake."""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["since"]))
    return (
        f"pid {record['pid']}, since {since}, {max(record['seconds_left'], 0) / 60:.1f} min left\n"
        f"  for {record['program']} in {record['folder']}, with {record['python']}\n"
        f"  imported: {', '.join(record['packages'])}\n"
        f"  socket: {path}"
    )
