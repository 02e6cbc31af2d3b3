"""The fork server: a single-threaded process that has imported what workers need and forks them from itself.

`client.ForkServer` starts it with the environment that the workers will have. It is the workers' parent: it reaps them
and tells the agent. It is a paused interpreter (`pause.py`). If workers forked from it would differ from fresh
interpreters, it starts anew without imports. It then forks a small process for each worker, which execs a fresh
interpreter.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from elaunch.agent.forkserver.boot import PROCESS_NAME, Boot, bare_command, pausing
from elaunch.agent.forkserver.fork_loop import ForkLoop
from elaunch.agent.linux import die_with_parent, set_command_line

if TYPE_CHECKING:
    from elaunch.agent.forkserver.hidden_modules import Gate
    from elaunch.agent.forkserver.preload import Preloaded
    from elaunch.agent.forkserver.warm.opened import Opened
    from elaunch.agent.forkserver.warm.server import WarmServer

# Jobs that ask at the same time.
_BACKLOG = 64


@dataclass(frozen=True)
class Child:
    """What a freshly forked process is to become. If `preloaded` is None, the process execs its program."""

    boot: Boot
    order: dict[str, Any]
    fds: tuple[int, ...]
    template_pid: int
    is_prepared: bool
    restore_mask: frozenset[int]
    preloaded: Preloaded | None = None
    loaded_at_start: Collection[str] = ()
    gate: Gate | None = None


def main(boot: Boot, loaded_at_start: Collection[str], customise: Callable[[], None]) -> None:
    """Import and serve until the agent is gone. Returns only in a forked worker, so that Python runs its program."""
    # A bare fork server is ready sooner without them.
    from elaunch.agent.forkserver import after_fork
    from elaunch.agent.forkserver.fork_safety import bound_by
    from elaunch.agent.forkserver.preload import Unfaithful, preload

    environment, began_ns, cpus = dict(os.environ), time.time_ns(), os.sched_getaffinity(0)
    mask, control = _settle(boot)
    opened = _opened() if boot.warm_s else None
    try:
        preloaded = preload(boot, loaded_at_start, customise)
        after_fork.know_threads(preloaded)
        if bound := bound_by(cpus):
            raise Unfaithful(bound)
    except Unfaithful as error:
        bound = bound_by(cpus)
        why, rest = (bound, None) if bound else (str(error), error.rest)
        if bound:
            os.sched_setaffinity(0, cpus)
        if boot.warm_s and not rest:
            _cannot_stay(control, why)
        told = (f"only {', '.join(rest)} can be preloaded: {why}",) if rest else ()
        fallback = "" if rest else why
        _start_anew(
            replace(
                boot,
                preload=rest or None,
                packages=(),
                fallback=fallback,
                left_out=(*boot.left_out, *told),
                mask=tuple(mask),
            ),
            environment,
        )
    # Before any fork: otherwise each worker would have to import and make the same itself, or have other modules than
    # the next ones.
    from elaunch.agent.forkserver import child, exit_report
    from elaunch.agent.forkserver.hidden_modules import Gate

    exit_report.load()
    files = opened.end() if opened else ()
    server = _warm(boot, control, preloaded, environment, loaded_at_start, files, began_ns) if boot.warm_s else None
    gate = Gate(preloaded.brought)
    gc.freeze()
    gc.enable()
    if server:
        # The server keeps what it needs of it.
        environment.clear()
        taken = server.serve()
        gate.move()
        boot, control, mask, preloaded = taken.boot, taken.control, taken.mask, taken.preloaded
    settle, prepare = partial(child.settle, boot.agent_pid), partial(child.prepare, preloaded)
    asked = ForkLoop(boot, control, settle, prepare).serve()
    child.become(Child(boot, *asked, mask, preloaded, loaded_at_start, gate))


def _opened() -> Opened:
    from elaunch.agent.forkserver.warm.opened import Opened

    return Opened()


def _warm(
    boot: Boot,
    listener: socket.socket,
    preloaded: Preloaded,
    environment: dict[str, str],
    loaded_at_start: Collection[str],
    opened: Collection[str],
    began_ns: int,
) -> WarmServer:
    """The warm fork server in this process, before modules are hidden. Ends the process if there can be none."""
    from elaunch.agent.forkserver.warm import interpreter, server

    try:
        modules = dict(sys.modules)
        return server.WarmServer(boot, listener, preloaded, environment, modules, loaded_at_start, opened, began_ns)
    except interpreter.Unknown as error:
        _cannot_stay(listener, f"{sys.executable} cannot be given another program: {error}")
    except server.ChangedMeanwhile as error:
        _cannot_stay(listener, f"{error} was written while it was imported")


def _cannot_stay(listener: socket.socket, why: str) -> NoReturn:
    from elaunch.agent.forkserver.warm.place import cannot_stay

    cannot_stay(Path(listener.getsockname()), why)
    os._exit(1)


def bare(boot_fd: str) -> None:
    """Serve without having imported anything: every worker execs a fresh interpreter. Does not return."""
    from elaunch.agent.forkserver import child

    boot = Boot.read(int(boot_fd))
    mask, control = _settle(boot)
    child.become(Child(boot, *ForkLoop(boot, control, partial(child.settle, boot.agent_pid)).serve(), mask))


def _settle(boot: Boot) -> tuple[frozenset[int], socket.socket]:
    """Set the fork server's signals, parent and name. Returns the earlier signal mask, and the socket to the agent."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    mask = frozenset(int(s) for s in before) if boot.mask is None else frozenset(boot.mask)
    # A scheduler signals every process of a job. Signals are blocked, not ignored: a child must inherit the defaults.
    # Real-time signals too, of which `signal.Signals` has only the first and the last.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGCHLD})
    for signum in boot.ignored:
        signal.signal(signum, signal.SIG_IGN)
    control = socket.socket(fileno=boot.control_fd)
    if boot.warm_s:
        set_command_line(("elaunch: warm fork server",), PROCESS_NAME)
        # The peer of a connection sees the pid of the process that called listen.
        control.listen(_BACKLOG)
    else:
        die_with_parent(boot.agent_pid, signal.SIGKILL)
        set_command_line(("elaunch: fork server",), "elaunch-fork")
    control.set_inheritable(False)
    return mask, control


def _start_anew(boot: Boot, environment: dict[str, str]) -> NoReturn:
    """Exec a fork server that imports what `boot` names, or a bare one. The signals stay blocked meanwhile."""
    os.set_inheritable(boot.control_fd, True)
    boot_fd = boot.memfd()
    if boot.preload is None:
        command = bare_command("server", "bare", str(boot_fd))
    else:
        from elaunch.agent.forkserver.fork_safety import open_files

        command, environment = list(boot.program.argv), pausing(environment, boot_fd)
        # What a module has left open would be blamed on the modules that the next process imports.
        for fd in open_files().keys() - {0, 1, 2, boot.control_fd, boot_fd}:
            os.set_inheritable(fd, False)
    os.execvpe(command[0], command, environment)
