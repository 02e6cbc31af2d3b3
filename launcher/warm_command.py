"""`elaunch warm`: shows the fork servers that stayed for the next start, or ends them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from elaunch.agent.forkserver.client import Cold, connected, greeting, servers, stop
from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.options.command_line import Command, own

_NONE = "no fork server stays; elaunch --warm script.py leaves one"


def _main(ctx: click.Context) -> int:
    """Run the command. Returns the exit code. Raises UsageError and SiteError."""
    stops, is_json = ctx.params["stop"], ctx.params["json"]
    if stops and is_json:
        raise UsageError("warm takes --json or --stop")
    try:
        paths = servers()
        if stops:
            ended = [path for path in paths if stop(path)]
            print(f"ended: {len(ended)} fork server{'s' * (len(ended) != 1)}" if ended else _NONE)
            return 0
    except Cold as error:
        if str(error):
            raise SiteError(str(error)) from error
        paths = []
    records = [_record(path) for path in paths]
    if is_json:
        print(json.dumps(records, indent=2))
    else:
        print("\n".join(map(_text, records)) or _NONE)
    return 3 if any("trouble" in record for record in records) else 0


COMMAND = Command(
    "warm",
    _main,
    [
        own("json", "", "show them as a JSON list"),
        own("stop", "", "end these fork servers"),
    ],
    usage=["[--json|--stop]"],
    about="Show this user's fork servers. They stay when a job with --warm has ended: the next start needs no import.",
    ending="Exit codes: 0 done, 2 the command line is wrong, 3 a fork server cannot be looked at or ended.",
)


def _record(path: Path) -> dict[str, Any]:
    """The object of `--json`."""
    try:
        with connected(path) as connection:
            found = greeting(connection)
    except Cold as error:
        return {"socket": str(path), "trouble": str(error) or "it has ended"}
    del found["event"]
    return {**found, "socket": str(path)}


def _text(record: dict[str, Any]) -> str:
    """Some lines for a person."""
    if "trouble" in record:
        return str(record["trouble"])
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["since"]))
    return (
        f"pid {record['pid']}, since {since}, {max(record['seconds_left'], 0) / 60:.1f} min left\n"
        f"  for {record['program']} in {record['folder']}, with {record['python']}\n"
        f"  imported: {', '.join(record['packages'])}\n"
        f"  socket: {record['socket']}"
    )
