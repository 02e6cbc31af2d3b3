"""The fork server: a single-threaded process that has imported what workers need and forks them from itself.

It is the workers' own interpreter, paused just before it would run the program (`hook/sitecustomize.py`). So Python
itself sets up a worker (command line, options, flags, `sys.path`) and what its program finds when it starts
(`__main__`, its stack, tracebacks, exit codes).

`client.ForkServer` starts it with the environment that the workers will have. It imports, checks itself once, and then
forks. If workers forked from it would differ from fresh interpreters, it starts again with torch alone, or without any
import: then a small process for each worker execs a fresh interpreter. As the workers' parent it reaps them.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

from elaunch.agent.forkserver import after_fork, child, reports, warm, wire
from elaunch.agent.forkserver.after_fork import HiddenModules
from elaunch.agent.forkserver.preload import Unfaithful, default_of, open_files, preload
from elaunch.agent.forkserver.wire import BOOT_VARIABLE, HOOK_DIR, SERVER_NAME, Boot
from elaunch.agent.linux import catches, die_with_parent, parent, set_command_line, signal_fd

# Signals by which a scheduler gives notice.
_NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
# Signals that a program may send to its parent, to end the launcher. SIGKILL ends this process.
_FROM_PROGRAMS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT, *_NOTICES)
_GROUP_POLL_S = 0.02
# A scheduler signals the processes of a step one after the other, and each node on its own.
_NOTICE_S = 1.0
# A killed process that waits for a disk exits later.
_KILLED_S = 1.0

# A generation, and a local rank or "store".
Name = tuple[int, int | str]
Order = tuple[dict[str, Any], tuple[int, ...]]


def main(loaded_at_start: Collection[str]) -> None:
    """Run the fork server until the agent exits. Returns only in a forked worker, so that Python runs its program.

    `loaded_at_start` are the modules of a bare interpreter.
    """
    boot = Boot.read(int(os.environ.pop(BOOT_VARIABLE)))
    reports.leave_hook(HOOK_DIR, boot.pythonpath)
    environment, cpus = dict(os.environ), os.sched_getaffinity(0)
    mask, control = _settle(boot)
    imports = warm.Imports(boot.program.target) if boot.facts else None
    try:
        preloaded = preload(boot, loaded_at_start, cpus)
    except Unfaithful as error:
        _start_again(boot, str(error), environment, mask, cpus)
    # Before any fork: otherwise each worker would have to repeat the search.
    if preloaded.module("numpy"):
        after_fork.openblas()
    if imports:
        imports.finish()
    hidden = HiddenModules(preloaded)
    gc.freeze()
    gc.enable()
    while True:
        template = child.Template(boot.program, boot.agent_pid, os.getpid(), mask, preloaded, hidden)
        order, fds = Server(boot, control).serve()
        if not imports or order["op"] != "stay":
            break
        server = warm.WarmServer(boot, imports, loaded_at_start)
        server.stay(order, control)
        boot, control = server.serve()
        given = dict(boot.environment)
        preloaded = replace(preloaded, restore={name: given.get(name) for name in preloaded.restore})
    child.become(template, order, fds)


def bare(boot_fd: str) -> None:
    """Serve without having imported anything: every worker execs a fresh interpreter. Does not return."""
    boot = Boot.read(int(boot_fd))
    mask, control = _settle(boot)
    template = child.Template(boot.program, boot.agent_pid, os.getpid(), mask)
    child.become(template, *Server(boot, control).serve())


def _settle(boot: Boot) -> tuple[Collection[int], socket.socket]:
    """Set the fork server's signals, parent and name. Returns the earlier signal mask, and the socket to the agent."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    mask = tuple(int(s) for s in before) if boot.mask is None else boot.mask
    # A scheduler signals every process of a job. Signals are blocked, not ignored: a child must inherit the defaults.
    # Real-time signals too, of which `signal.Signals` has only the first and the last.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGCHLD})
    for signum in boot.ignored:
        signal.signal(signum, signal.SIG_IGN)
    control = socket.socket(fileno=boot.control_fd)
    die_with_parent(boot.agent_pid, signal.SIGKILL)
    set_command_line(("elaunch: fork server",), SERVER_NAME)
    control.set_inheritable(False)
    return mask, control


def _start_again(
    boot: Boot, why: str, environment: dict[str, str], mask: Collection[int], cpus: Collection[int]
) -> NoReturn:
    """Exec a fork server that imports torch alone, or one that imports nothing. The signals stay blocked meanwhile."""
    rest = default_of(boot)
    # The imports may have bound this process to fewer.
    os.sched_setaffinity(0, cpus)
    left_out = (f"only {', '.join(rest)} can be preloaded: {why}",) if rest else ()
    boot = replace(
        boot,
        preload=rest,
        packages=(),
        fallback="" if rest else why,
        left_out=(*boot.left_out, *left_out),
        mask=tuple(mask),
    )
    # Otherwise a file that a module left open would be blamed on the modules that the next process imports.
    for fd in open_files().keys() - {0, 1, 2}:
        os.set_inheritable(fd, fd == boot.control_fd)
    command, environment = boot.command(environment, boot.memfd())
    os.execvpe(command[0], command, environment)


class Server:
    """Forks, signals and reaps for the agent at the other end of `control`."""

    def __init__(self, boot: Boot, control: socket.socket) -> None:
        self._boot = boot
        self._control = control
        self._children = Children()
        self._notices: set[int] = set()
        self._signals = -1
        # Where the system has no signalfd (a sandbox), a signal to this process is ignored.
        with suppress(OSError):
            self._signals = signal_fd(_FROM_PROGRAMS)
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector = selectors.DefaultSelector()

    def serve(self) -> Order:
        """Carry out the agent's orders until it exits, then exit. Returns in a child, with the order that made it.

        In this process it returns only with the order "stay", which comes after the job.
        """
        self._report({"event": "ready", "reason": self._boot.fallback, "left_out": self._boot.left_out})
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        for fd in (self._control.fileno(), self._wake_r, self._signals):
            if fd >= 0:
                self._selector.register(fd, selectors.EVENT_READ)
        while True:
            if order := self._turn():
                return order

    def _turn(self) -> Order | None:
        """Wait for something to do, and do it. Returns the order in a forked process, and "stay" in this one."""
        ready = {key.fd for key, _ in self._selector.select(_GROUP_POLL_S if self._children.waits_for_groups else None)}
        if self._wake_r in ready:
            os.read(self._wake_r, 4096)
        if self._signals in ready:
            # Before `reap`: its sender may have exited since, and has a name until it is reaped.
            self._report_signal()
        if self._wake_r in ready or self._children.waits_for_groups:
            for exited in self._children.reap():
                # An agent that uses another fork server now has closed the socket, perhaps before this report.
                self._report(exited)
        if self._control.fileno() not in ready:
            return None
        packet = wire.receive(self._control)
        if packet is None:
            # The kernel kills the children. In a container there may be no other process to reap zombies.
            list(self._children.reap())
            os._exit(0)
        order, fds = packet
        match order["op"]:
            case "signal":
                names, signum = {(order["generation"], key) for key in order["keys"]}, order["signum"]
                if order["is_notice"]:
                    # Only this process lists all children: the agent may not have read yet that they were forked.
                    catching = self._children.catching(names, signum)
                    if catching and not self._reaches_all(signum):
                        self._children.signal(catching, signum, group=False)
                    names, signum = names - catching, signal.SIGTERM
                self._children.signal(names, signum, order["group"])
            case "stay":
                self._children.kill()
                self._release()
                return order, fds
            case _:
                return self._fork(order, fds)
        return None

    def _report(self, event: dict[str, Any]) -> None:
        """Send an event to the agent. If the agent has exited, this process and its children exit too."""
        try:
            wire.send(self._control, event)
        except (BrokenPipeError, ConnectionResetError):
            os._exit(1)

    def _report_signal(self) -> None:
        found = signal.sigtimedwait(_FROM_PROGRAMS, 0)
        if found and (name := self._children.whose(found.si_pid)):
            self._report({"event": "signal", "generation": name[0], "key": name[1], "signum": found.si_signo})
        elif found and found.si_signo in _NOTICES:
            self._notices.add(found.si_signo)

    def _reaches_all(self, signum: int) -> bool:
        """Whether a scheduler signals all processes, so that the workers have its notice or get it soon.

        The agent may be signalled first, or get the notice from another node: wait for the signal to this process.
        """
        if signum not in self._notices:
            came = signal.sigtimedwait({signum}, _NOTICE_S)
            if came and not self._children.whose(came.si_pid):
                self._notices.add(signum)
        return signum in self._notices

    def _fork(self, order: dict[str, Any], fds: tuple[int, ...]) -> Order | None:
        """Make a process for the order. Returns the order in that process."""
        name = {"generation": order["generation"], "key": order["key"]}
        try:
            pid = os.fork()
        except OSError as error:
            self._report({**name, "event": "unstarted", "why": error.strerror})
        else:
            if pid == 0:
                # The program may use this fd again. If the socket object closed it, it would close the program's file.
                os.close(self._control.detach())
                self._release()
                return order, fds
            self._children.add(pid, (order["generation"], order["key"]))
            self._report({**name, "event": "forked", "pid": pid})
        for fd in fds:
            os.close(fd)
        return None

    def _release(self) -> None:
        signal.set_wakeup_fd(-1)
        self._selector.close()
        for fd in (self._wake_r, self._wake_w, self._signals):
            if fd >= 0:
                os.close(fd)


class Children:
    """The children of this process by pid. Each has a name: its generation, and its local rank or "store".

    Only this process reaps them, so a pid belongs to its child until then. A child makes a process group of its own
    when it starts.
    """

    def __init__(self) -> None:
        self._names: dict[int, Name] = {}
        # `_signalled` are leaders of process groups that were signalled as a whole. `_held` are exits of leaders that
        # came before their groups': a shell exits immediately, while the program that it started may be saving.
        self._signalled: set[int] = set()
        self._held: dict[int, dict[str, Any]] = {}

    @property
    def waits_for_groups(self) -> bool:
        """Whether `reap` must be called again although no child exits."""
        return bool(self._held)

    def add(self, pid: int, name: Name) -> None:
        self._names[pid] = name

    def reap(self) -> Iterator[dict[str, Any]]:
        """The exits since the last call, in the order of the children's starts."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                pid, status = ended
                # Others are processes that a preloaded module has started.
                if name := self._names.pop(pid, None):
                    code = os.waitstatus_to_exitcode(status)
                    exited = {"event": "exited", "generation": name[0], "key": name[1], "pid": pid, "code": code}
                    if pid in self._signalled:
                        self._held[pid] = exited
                    else:
                        yield exited
        if self._held:
            for pid in [pid for pid in self._held if pid not in self._signalled or not _signal_group(pid, 0)]:
                self._signalled.discard(pid)
                yield self._held.pop(pid)

    def signal(self, names: Collection[Name], signum: int, group: bool) -> None:
        """Signal the children with these names, or their process groups. After SIGKILL nothing waits for a group."""
        living = [pid for pid, name in self._names.items() if name in names]
        held = [pid for pid, exited in self._held.items() if (exited["generation"], exited["key"]) in names]
        if signum == signal.SIGKILL:
            self._signalled.difference_update(living, held)
        elif group:
            self._signalled.update(living)
        for pid in living:
            # A child that has not called setsid has no group yet.
            if not group or not _signal_group(pid, signum):
                with suppress(PermissionError):
                    os.kill(pid, signum)
        for pid in held:
            # The pid remains the group's number as long as the group has members.
            _signal_group(pid, signum)

    def catching(self, names: Collection[Name], signum: int) -> set[Name]:
        """Those of the living children that have a handler for the signal."""
        return {name for pid, name in self._names.items() if name in names and catches(pid, signum)}

    def kill(self) -> None:
        """Kill and reap all children that are left."""
        until_s = time.monotonic() + _KILLED_S
        for pid in self._names:
            os.kill(pid, signal.SIGKILL)
        while self._names and time.monotonic() < until_s:
            list(self.reap())
            time.sleep(0.001)

    def whose(self, pid: int) -> Name | None:
        """The name of the child which that process is or descends from; None if there is none, or it was reaped."""
        while pid and pid not in self._names:
            pid = parent(pid)
        return self._names.get(pid)


def _signal_group(leader: int, signum: int) -> bool:
    """Signal a process group. Returns whether it exists."""
    try:
        os.killpg(leader, signum)
    except ProcessLookupError:
        return False
    except PermissionError:
        # All of its processes are another user's (sudo).
        return True
    return True
