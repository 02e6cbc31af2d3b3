"""Turns a process that the fork server has forked into a worker, or into the generation's worker store."""

from __future__ import annotations

import fcntl
import importlib
import os
import resource
import signal
import site
import socket
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

from elaunch.agent.environment import arguments
from elaunch.agent.forkserver import after_fork, collectives, debugger, reports, wire
from elaunch.agent.forkserver.after_fork import HiddenModules
from elaunch.agent.forkserver.preload import Preloaded, open_files, programs_place, restore_environment
from elaunch.agent.linux import allow_tracer, die_with_parent, set_command_line
from elaunch.rendezvous.types import Program, ProgramKind

# The number of the crash file among the descriptors that came with the order.
_CRASH_FD = 4
# A program that uses descriptors by number, or closes them in a loop, uses low ones.
_HIGH_FD = 1023
# In a worker store: the listening socket, and the one to the agent.
LISTEN_FD, CONTROL_FD = 3, 4
# In characters: the error goes into one packet, and into a failure's message.
_ERROR_MAX = 2000


@dataclass(frozen=True)
class Template:
    """What all children of a fork server have in common. If `preloaded` is None, a worker execs its program.

    `mask` are the signals that a worker blocks from its start.
    """

    program: Program
    agent_pid: int
    pid: int
    mask: Collection[int]
    preloaded: Preloaded | None = None
    hidden: HiddenModules | None = None


def become(template: Template, order: dict[str, Any], fds: tuple[int, ...]) -> None:
    """Become what is ordered, right after the fork. Returns only if Python itself is to start the program now."""
    die_with_parent(template.pid, signal.SIGKILL)
    # Yama denies the agent's py-spy otherwise: it is no ancestor of this process.
    allow_tracer(template.agent_pid)
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    preloaded = template.preloaded
    take_fds(fds, preloaded.kept_fds if preloaded else ())
    if order["op"] == "store":
        # The store's signals stay blocked: it ends when the agent orders it, or with its parent.
        distributed = preloaded and preloaded.module("torch.distributed")
        serve_store(order["host"], order["port"], store_class=getattr(distributed, "TCPStore", None))
    crash_fd = _move_high(_CRASH_FD)
    if preloaded:
        restore_environment(preloaded.restore)
    os.environ.update(order["env"])
    if order["cpus"]:
        os.sched_setaffinity(0, order["cpus"])
    given = template.program.args
    program = replace(template.program, args=arguments(given, order["key"]))
    if preloaded is None:
        _exec(program, template.mask, crash_fd)
    set_command_line(program.argv, os.path.basename(program.argv[0]))  # noqa: PTH119
    if given:
        sys.argv[-len(given) :] = sys.orig_argv[-len(given) :] = program.args
    after_fork.refresh(preloaded)
    after_fork.renew_streams()
    reports.report_crash(crash_fd)
    link = reports.report_exit(crash_fd)
    collectives.prepare(preloaded.module(collectives.C10D))
    if template.hidden:
        template.hidden.begin(link)
    if signal.SIGINT in signal.sigpending() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # The pending SIGINT ends the process. It must not raise KeyboardInterrupt in elaunch's own frames.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, template.mask)
    debugger.prepare()


def take_fds(fds: tuple[int, ...], kept: Collection[int]) -> None:
    """Make fds[0:3] the standard streams, and the rest of `fds` the fds from 3 on. Close all others but `kept`."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for fd in fds]
    for fd, number in zip(high, range(len(fds)), strict=True):
        os.dup2(fd, number, inheritable=number < 3)
    for fd in open_files().keys() - {*range(len(fds)), *kept}:
        os.close(fd)


def _move_high(fd: int) -> int:
    """Move the descriptor to a high number. Returns it; -1 if none is free."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    high = _HIGH_FD if limit == resource.RLIM_INFINITY else min(_HIGH_FD, limit - 1)
    moved = -1
    with suppress(OSError):
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, high)
    os.close(fd)
    return moved


def _is_shadowed(program: Program) -> bool:
    """Whether a file beside the program has the name of a module that a fresh worker's reports need."""
    place, exists = programs_place(program), os.path.exists
    return any(exists(f"{place}/{name}.py") or exists(f"{place}/{name}/__init__.py") for name in reports.NEEDED)


def _exec(program: Program, mask: Collection[int], crash_fd: int) -> NoReturn:
    # Python ignores these two signals from its start. A fresh program expects the defaults.
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # A pending SIGINT ends the process. It must not raise KeyboardInterrupt in elaunch's own frames.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.set_inheritable(reports.LINK_FD, True)
    environment = dict(os.environ)
    if program.kind is not ProgramKind.COMMAND and program.interpreter == sys.executable:
        # Another interpreter may not have elaunch, and a command may be anything.
        environment = wire.reporting(environment, crash_fd, reports_exit=not _is_shadowed(program))
        if crash_fd >= 0:
            os.set_inheritable(crash_fd, True)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        os.execvpe(program.argv[0], program.argv, environment)
    except OSError as error:
        os.write(2, f"elaunch: {program.argv[0]} cannot be started: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def serve_store(host: str, port: int, *, store_class: Any = None) -> NoReturn:
    """Host a TCPStore for one generation, on a socket that was bound before, until the agent closes its control socket.

    It has a process of its own, so that the death of rank 0 does not hide the real error. Each generation has a new
    store, so that no key of an older generation is read again. `store_class` is torch's TCPStore, if this process has
    it.
    """
    set_command_line(("elaunch: worker store",), "elaunch-store")
    control = socket.socket(fileno=CONTROL_FD)
    try:
        if sys.flags.no_site:
            # A bare fork server has no installed packages on sys.path.
            site.main()
        tcp_store = store_class or importlib.import_module("torch.distributed").TCPStore
        serve = partial(tcp_store, host, port, is_master=True, wait_for_workers=False, master_listen_fd=LISTEN_FD)
        try:
            _store = serve()
        except NotImplementedError:
            # In torch 2.6 only the server without libuv takes a socket.
            _store = serve(use_libuv=False)
    except Exception as error:
        wire.send(control, {"error": f"{type(error).__name__}: {error}"[:_ERROR_MAX]})
        os._exit(1)
    wire.receive(control)
    # Python's and C++'s destructors have nothing left to do.
    os._exit(0)
