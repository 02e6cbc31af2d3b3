"""A debugger in a worker: an IDE attaches before the program begins, or IDE or pdb when that has raised an exception.

A fresh worker imports this before its program, so it imports the rest only where a debugger is requested.
"""

from __future__ import annotations

import os
import sys

from elaunch.agent.forkserver import reports

_KEPT = (
    "restarts and hang detection are off; the other ranks wait in their next collective until its timeout, which fails"
    " the job: 10 min with NCCL, 30 min with gloo, unless init_process_group(timeout=…) gives another"
)


def prepare() -> None:
    """Wait for an IDE, or prepare for an exception, if the agent has requested it. The program comes next."""
    when, _, which = os.environ.pop("ELAUNCH_DEBUG", "").partition(" ")
    link, is_meant = os.fstat(reports.LINK_FD).st_ino, which in ("any", os.environ["RANK"])
    if when == "start" and is_meant:
        _attach(link, "waits for an IDE before its program")
    elif when == "error":
        mark = f"{os.environ.get('ELAUNCH_MEMORY')}/debugged-{os.environ['ELAUNCH_GENERATION']}"
        pid = os.getpid()
        # A child that the program forked runs this too, but its program is not the rank's.
        reports.at_program_end(lambda: _examine(link, mark, is_meant=is_meant) if os.getpid() == pid else None)


def _examine(link: int, mark: str, *, is_meant: bool) -> None:
    """If the program has raised an exception, open a debugger there, in the first rank of this node that is meant.

    The other ranks that have raised wait: the first exit ends the job, and so the debugger.
    """
    import signal

    from elaunch.agent.diagnosis.exit_status import is_peer_lost

    error = reports.fatal()
    name = type(error).__name__
    if error is None or name in ("KeyboardInterrupt", "BdbQuit") or is_peer_lost(name, reports.message_of(error)):
        # It has ended with the job, a debugger, or another rank.
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        if is_meant:
            os.mkdir(mark)  # noqa: PTH102
    except FileExistsError:
        is_meant = False
    if not is_meant:
        text = f"has raised {name}, and waits for the debugger of another rank; Ctrl-C ends the job"
        reports.send(link, {"event": "note", "text": text})
        while True:
            signal.pause()
    if not os.isatty(0):
        _attach(link, f"has raised {name}, and waits for an IDE")
        sys.modules["debugpy"].trigger_exception_handler(error, as_uncaught=False)
        return
    import pdb

    # It edits lines, and keeps their history, only where stdin and stdout are the terminal.
    sys.stdin, sys.stdout = sys.__stdin__, sys.__stdout__
    output = os.dup(1)
    os.dup2(0, 1)
    print(f"elaunch: rank {os.environ['RANK']} has raised {name}; q ends the job\nelaunch: {_KEPT}")
    pdb.pm()
    os.dup2(output, 1)


def _attach(link: int, state: str) -> None:
    """Log where an IDE can attach, and return when it has."""
    # Else debugpy prints advice about Python's own modules.
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    import debugpy

    try:
        # The port in VS Code's own examples.
        _, port = debugpy.listen(("127.0.0.1", 5678))
    except RuntimeError:
        _, port = debugpy.listen(("127.0.0.1", 0))
    attach = f'"type": "debugpy", "request": "attach", "connect": {{"host": "127.0.0.1", "port": {port}}}'
    lines = (
        f"pid {os.getpid()} {state}; for VS Code, in launch.json: {attach}",
        f"from another host first: ssh -L {port}:127.0.0.1:{port} {os.uname().nodename}",
        _KEPT,
    )
    reports.send(link, {"event": "note", "text": "\n".join(lines)})
    debugpy.wait_for_client()
