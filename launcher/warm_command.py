"""`elaunch warm`: shows the fork servers that stayed for the next start, or ends them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import click

from elaunch.agent.warm import NoPlace, Stayed, all_that_stayed, end
from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.options.command_line import Command, own
from elaunch.launcher.options.table import HELP

_NONE = "no fork server stays; elaunch --warm script.py leaves one"


def _main(ctx: click.Context) -> int:
    """Run the command. Returns the exit code. Raises UsageError and SiteError."""
    stops, is_json = ctx.params["stop"], ctx.params["json"]
    if stops and (ctx.params["status"] or is_json):
        raise UsageError("warm takes --status [--json], or --stop")
    try:
        found = all_that_stayed()
    except NoPlace as error:
        raise SiteError(str(error)) from error
    if stops:
        return _stop(found)
    if is_json:
        print(json.dumps([record(each) for each in found], indent=2))
    else:
        print("\n".join([text(each) for each in found]) or _NONE)
    return 3 if any(each.trouble and not each.is_gone for each in found) else 0


COMMAND = Command(
    "warm",
    _main,
    [
        own(
            "status",
            "",
            "show this user's fork servers: pid, since when, what is imported, memory, minutes left, and where",
        ),
        own("json", "", "with --status: as a JSON list"),
        own("stop", "", "end these fork servers; running jobs go on"),
        HELP,
    ],
    usage=["[--status] [--json]", "--stop"],
    about="Fork servers stay when a job with --warm has ended, so that the next start needs no import.",
    ending="Exit codes: 0 done, 2 the command line is wrong, 3 a fork server cannot be looked at or ended.",
)


def _stop(found: Sequence[Stayed]) -> int:
    troubles = [why for each in found if (why := end(each))]
    if troubles:
        raise SiteError("; ".join(troubles))
    there = [each for each in found if not each.is_gone]
    ended = [f"the fork server with pid {each.state.pid}" if each.state else str(each.path) for each in there]
    print(f"ended: {', '.join(ended)}" if ended else _NONE)
    return 0


def record(stayed: Stayed) -> dict[str, object]:
    """The object of `--json`."""
    state = stayed.state
    if state is None:
        return {"socket": str(stayed.path), "trouble": stayed.trouble}
    return {
        "pid": state.pid,
        "since": state.since,
        "seconds_left": state.left_s,
        "jobs": state.jobs,
        "python": state.python,
        "program": state.program,
        "packages": list(state.packages),
        "pss_bytes": stayed.pss_bytes,
        "socket": str(stayed.path),
    }


def text(stayed: Stayed) -> str:
    """Some lines for a person."""
    state = stayed.state
    if state is None and stayed.is_gone:
        return f"{stayed.trouble}; elaunch --warm script.py leaves another one"
    if state is None:
        return f"{stayed.path}: {stayed.trouble}"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.since))
    users = f"{state.jobs} job{'s' if state.jobs > 1 else ''} from it run"
    left = users if state.left_s is None else f"{max(state.left_s, 0) / 60:.1f} min left"
    memory = "memory not known" if stayed.pss_bytes is None else f"{stayed.pss_bytes / 1e6:.0f} MB of memory"
    kinds = {"script": "scripts", "module": "modules (-m)"}
    return (
        f"pid {state.pid}, since {since}, {left}, {memory}\n"
        f"  imported: {', '.join(state.packages) or 'nothing'}\n"
        f"  for {kinds.get(state.program, state.program)} with {state.python}\n"
        f"  socket: {stayed.path}"
    )
