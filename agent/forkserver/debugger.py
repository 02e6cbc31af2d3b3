"""A debugger in a worker: an IDE attaches before the program begins, or IDE or pdb when that has raised an exception.

A fresh worker imports this before its program, so it imports the rest only where a debugger is requested.
"""

from __future__ import annotations

import os
import sys

from elaunch.agent.forkserver import reports

_KEPT = (
    "the other ranks wait in their next collective until its timeout, which fails the job: 10 min with NCCL, 30 min"
    " with gloo, unless init_process_group(timeout=…) gives another (no variable does)"
)


def prepare() -> None:
    """Wait for an IDE, or prepare for an exception, if the agent has requested it. The program comes next."""
    when = os.environ.pop("ELAUNCH_DEBUG", "")
    if not when:
        return
    link, pid, memory = os.fstat(reports.LINK_FD).st_ino, os.getpid(), os.environ.get("ELAUNCH_MEMORY")
    if when == "start":
        _attach(link, "waits for an IDE before its program")
    else:
        mark = f"{memory}/debugged-{os.environ['ELAUNCH_GENERATION']}" if memory else ""
        reports.at_program_end(lambda: _examine(pid, link, mark))


def _examine(pid: int, link: int, mark: str) -> None:
    """If the program has raised an exception, open a debugger there, in the first rank of this node that gets here."""
    import signal

    from elaunch.agent.diagnosis.exit_status import is_peer_lost

    error = reports.fatal()
    name = type(error).__name__
    # A child that the program forked gets here too.
    if error is None or os.getpid() != pid:
        return
    if name in ("KeyboardInterrupt", "BdbQuit") or is_peer_lost(name, reports.message_of(error)):
        # It has ended with the job, a debugger, or another rank.
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        os.mkdir(mark)  # noqa: PTH102
    except FileExistsError:
        while True:
            signal.pause()
    except OSError:
        # No folder is shared by the ranks of this node: each gets a debugger.
        pass
    if not os.isatty(0):
        _attach(link, f"has raised {name}, and waits for an IDE")
        sys.modules["debugpy"].trigger_exception_handler(error, as_uncaught=False)
        return
    import pdb

    # It edits lines, and keeps their history, only where stdin and stdout are the terminal.
    output = os.dup(1)
    os.dup2(0, 1)
    sys.stdin, sys.stdout = sys.__stdin__, sys.__stdout__
    print(f"elaunch: rank {os.environ['RANK']} has raised {name}; q ends the job\nelaunch: {_KEPT}")
    pdb.pm()
    os.dup2(output, 1)


def _attach(link: int, state: str) -> None:
    """Log where an IDE can attach, and return when it has."""
    import socket
    from importlib import import_module

    # Else debugpy prints advice about Python's own modules.
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    debugpy = import_module("debugpy")
    # The port in VS Code's own examples, if it is free.
    port = 5678
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        port = 0
    _, port = debugpy.listen(("127.0.0.1", port))
    host = os.uname().nodename
    lines = (
        f"pid {os.getpid()} {state}; for VS Code, in launch.json:",
        '  "type": "debugpy",',
        '  "request": "attach",',
        f'  "connect": {{"host": "127.0.0.1", "port": {port}}}',
        f"from another host first: ssh -L {port}:127.0.0.1:{port} {host}",
        _KEPT,
    )
    reports.send(link, {"event": "note", "text": "\n".join(lines)})
    debugpy.wait_for_client()
