"""A forked process becomes a worker, or the worker store."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from elaunch.agent.environment import arguments
from elaunch.agent.forkserver.boot import NEEDED, hooked
from elaunch.agent.forkserver.server import Child
from elaunch.agent.linux import allow_tracer, die_with_parent, set_command_line
from elaunch.rendezvous.job_spec import Program, ProgramKind

if TYPE_CHECKING:
    from elaunch.agent.forkserver.preload import Preloaded

# The number of the crash file among the descriptors that came with the order.
_CRASH_FD = 4
# A program that takes descriptors by number, or closes them in a loop, takes low ones.
_HIGH_FD = 1023


def settle(agent_pid: int, template_pid: int) -> None:
    """Right after the fork: have a session and a parent, and not the parent's signals."""
    die_with_parent(template_pid, signal.SIGKILL)
    # Its py-spy is this process's cousin.
    allow_tracer(agent_pid)
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def prepare(preloaded: Preloaded) -> None:
    """Do ahead of the order what does not depend on it."""
    from elaunch.agent.forkserver import after_fork

    after_fork.refresh(preloaded)
    _own_cgroups()


def become(child: Child) -> None:
    """Become the process that `child` describes. Returns only if Python itself is to start the program now."""
    take_fds(child.fds)
    crash_fd = _put_away(_CRASH_FD) if child.order["op"] == "worker" else -1
    _enter(child.order["cgroup"])
    if child.order["op"] == "store":
        from elaunch.agent.forkserver import worker_store

        # The store's signals stay blocked: it ends when the agent says so, or with its parent.
        distributed = child.preloaded and child.preloaded.module("torch.distributed")
        store_class = getattr(distributed, "TCPStore", None)
        worker_store.serve(child.order["host"], child.order["port"], store_class=store_class)
    if child.preloaded:
        from elaunch.agent.forkserver.preload import restore_environment

        restore_environment(child.preloaded.restore)
    os.environ.update(child.order["env"])
    if child.order["cpus"]:
        os.sched_setaffinity(0, child.order["cpus"])
    program = child.boot.program
    given = program.args
    program = replace(program, args=arguments(given, child.order["local_rank"]))
    if child.preloaded is None:
        _exec(program, child, crash_fd)
    set_command_line(program.argv, os.path.basename(program.argv[0]))  # noqa: PTH119
    if given:
        sys.argv[-len(given) :] = sys.orig_argv[-len(given) :] = program.args
    from elaunch.agent.forkserver import after_fork, collectives, crash_stack, exit_report

    if not child.is_prepared:
        after_fork.refresh(child.preloaded)
    after_fork.standard_streams()
    crash_stack.enable(crash_fd)
    link = exit_report.promise(crash_fd)
    collectives.prepare(child.preloaded.module(collectives.C10D))
    if child.gate:
        child.gate.stand(link)
    if signal.SIGINT in signal.sigpending() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # The pending SIGINT ends the process. It must not raise KeyboardInterrupt in elaunch's own frames.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, child.restore_mask)


def _enter(cgroup: str) -> None:
    """Enter the generation's cgroup, unless this process was born there.

    If that fails, the marker in its environment still names it.
    """
    if cgroup:
        with suppress(OSError):
            place = Path(cgroup)
            # The last line is that of cgroup v2. A move takes 8 to 30 ms, also one to where the process already is.
            if not _own_cgroups().endswith(f"/{place.parent.name}/{place.name}"):
                (place / "cgroup.procs").write_text("0")


@cache
def _own_cgroups() -> str:
    """Where this process was when it first asked; empty if the kernel does not say.

    Not for the fork server, whose forks would believe the same.
    """
    with suppress(OSError), open("/proc/self/cgroup", errors="surrogateescape") as file:  # noqa: PTH123
        return file.read().rstrip("\n")
    return ""


def take_fds(fds: tuple[int, ...]) -> None:
    """Make fds[0:3] the standard streams, and the rest of `fds` the fds from 3 on. Close all other descriptors."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for fd in fds]
    for fd, place in zip(high, range(len(fds)), strict=True):
        os.dup2(fd, place, inheritable=place < 3)
    os.closerange(len(fds), max(int(name) for name in os.listdir("/proc/self/fd")) + 1)  # noqa: PTH208


def _put_away(fd: int) -> int:
    """Move the descriptor to a high number, which is returned; -1 if that cannot be."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    high = _HIGH_FD if limit == resource.RLIM_INFINITY else min(_HIGH_FD, limit - 1)
    moved = -1
    with suppress(OSError):
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, high)
    os.close(fd)
    return moved


def _is_shadowed(program: Program) -> bool:
    """Whether a file beside the program has the name of a module that `fresh` would import before it."""
    place = os.getcwd() if program.kind is ProgramKind.MODULE else program.target  # noqa: PTH109
    if not os.path.isdir(place):  # noqa: PTH112
        place = os.path.dirname(os.path.realpath(place))  # noqa: PTH120
    there = os.path.exists
    return any(there(f"{place}/{name}.py") or there(f"{place}/{name}/__init__.py") for name in NEEDED)


def _exec(program: Program, child: Child, crash_fd: int) -> NoReturn:
    # Python ignores these two signals from its start. A fresh program expects the defaults.
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # A pending SIGINT ends the process. It must not raise KeyboardInterrupt in elaunch's own frames.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if len(child.fds) > 3:
        os.set_inheritable(3, True)
    if program.kind is not ProgramKind.COMMAND and program.interpreter == sys.executable:
        # Another interpreter may not have elaunch, and a command may be anything.
        os.environ.update(hooked(os.environ, crash_fd, reports=not _is_shadowed(program)))
        if crash_fd >= 0:
            os.set_inheritable(crash_fd, True)
    signal.pthread_sigmask(signal.SIG_SETMASK, child.restore_mask)
    try:
        os.execvpe(program.argv[0], program.argv, os.environ)
    except OSError as error:
        os.write(2, f"elaunch: {program.argv[0]} cannot be started: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)
