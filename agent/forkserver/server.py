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
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from elaunch.agent.forkserver.boot import Boot, bare_command, pausing
from elaunch.agent.forkserver.fork_loop import ForkLoop
from elaunch.agent.linux import die_with_parent, set_command_line

if TYPE_CHECKING:
    from elaunch.agent.forkserver.hidden_modules import Gate
    from elaunch.agent.forkserver.preload import Preloaded


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

    environment, cpus = dict(os.environ), os.sched_getaffinity(0)
    mask, control = _settle(boot)
    imports = None
    if boot.facts:
        from elaunch.agent.forkserver import warm

        imports = warm.Imports(boot.program.target)
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
    if imports:
        imports.finish()
    gate = Gate(preloaded.brought)
    gc.freeze()
    gc.enable()
    while True:
        settle, prepare = partial(child.settle, boot.agent_pid), partial(child.prepare, preloaded)
        asked = ForkLoop(boot, control, settle, prepare).serve()
        if not imports or asked[0]["op"] != "stay":
            break
        server = warm.WarmServer(boot, imports, loaded_at_start)
        server.stay(asked[0], control)
        boot, control = server.serve()
        # In a fork, for another run.
        given = dict(boot.environment)
        preloaded = replace(preloaded, restore={name: given.get(name) for name in preloaded.restore})
    child.become(Child(boot, *asked, mask, preloaded, loaded_at_start, gate))


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
