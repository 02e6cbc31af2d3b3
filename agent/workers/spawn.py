"""Orders one generation's workers and worker store from the fork server, each with its descriptors and environment.

The standard streams of the workers are among them: pipes by which their output is routed to console and files.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from string import Template

from elaunch import __version__
from elaunch.agent import environment
from elaunch.agent.config import AgentConfig, CannotRun, Streams
from elaunch.agent.diagnosis.exit_status import shows_only_lost_peer
from elaunch.agent.environment import extensions_root
from elaunch.agent.forkserver import wire
from elaunch.agent.forkserver.client import ForkServer
from elaunch.agent.linux import is_in_foreground, start_thread
from elaunch.agent.output.pump import Pump
from elaunch.agent.output.run_dir import RunDir
from elaunch.agent.output.streams import LogFile, ShownTracebacks, TracebackFold, WorkerStream, is_pipe
from elaunch.agent.workers.group import Worker, WorkerGroup
from elaunch.agent.workers.link import Link
from elaunch.agent.workers.topology import cpu_set, read_topology
from elaunch.rendezvous.endpoint import is_loopback
from elaunch.rendezvous.format import node_host
from elaunch.rendezvous.rules.assign_ranks import role_of
from elaunch.rendezvous.types import Program, ProgramKind

# torch.distributed puts the rank before each line.
_INTERRUPTED = re.compile(r"^(?:\[rank\d+\]: )?KeyboardInterrupt\s*\Z", re.MULTILINE)
_OWN_ADDRESS = "give one of this host's with --master-addr, or leave it out"


class MasterPort:
    """The port of this node's next worker store, reserved by a socket that listens on it."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        # For a worker store to take over.
        self.listener: socket.socket | None = None

    def reserve(self) -> int:
        """The reserved port. If none is reserved, reserve one. Raises CannotRun."""
        self.listener = self.listener or reserve(self._config)
        return int(self.listener.getsockname()[1])

    def release(self) -> None:
        """The worker store has the socket now: close it here. A single port that the user chose stays reserved."""
        if len(self._config.master_ports) != 1:
            self.close()

    def close(self) -> None:
        """Let another process bind the port."""
        if self.listener:
            self.listener.close()
        self.listener = None


def reserve(config: AgentConfig) -> socket.socket:
    """A socket that listens on one of the config's master ports, or on a free port. No other process can take the port.

    Raises CannotRun if the wanted ports are taken, or the address is not this host's.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(config.master_addr, None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise CannotRun(f"the address {config.master_addr} is unknown ({error.strerror}); {_OWN_ADDRESS}") from error
    host = str(address[0])
    is_dual = False
    is_name = config.master_addr not in (host, "localhost")
    # This host may resolve MASTER_ADDR to a loopback address (Debian's 127.0.1.1), but no other node does.
    if config.spec.nodes_max > 1 and is_name and is_loopback(host):
        # Listen for IPv6 and IPv4, or only for IPv4 on a host without IPv6.
        is_dual = socket.has_dualstack_ipv6()
        family, host = (socket.AF_INET6, "::") if is_dual else (socket.AF_INET, "")
    for port in config.master_ports or (0,):
        try:
            # With SO_REUSEADDR: the kernel may still keep old connections of the last generation's port.
            return socket.create_server((host, port), family=family, backlog=1024, dualstack_ipv6=is_dual)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                why = os.strerror(error.errno) if error.errno else str(error)
                text = f"{config.master_addr} is not an address of this host ({why}); {_OWN_ADDRESS}"
                raise CannotRun(text) from error
    ports = config.master_ports
    wanted = f"port {ports[0]} is" if len(ports) == 1 else f"ports {ports[0]}–{ports[-1]} are all"
    raise CannotRun(f"{wanted} in use on {config.master_addr}; choose others with --master-port FIRST:LAST")


def warn_of_locks(environ: Mapping[str, str], warn: Callable[[str], None]) -> None:
    """Warn of locks in the extensions folder of workers with these variables.

    In a thread, since the folder may be on a disk that hangs.
    """
    if root := extensions_root(environ):
        start_thread(partial(_warn_of_each_lock, Path(root), warn), "elaunch-builds")


def _warn_of_each_lock(root: Path, warn: Callable[[str], None]) -> None:
    with suppress(OSError):
        # An extension's folder may be below one for each torch build.
        for lock in sorted(lock for pattern in ("*/lock", "*/*/lock") for lock in root.glob(pattern)):
            status = lock.lstat()
            if status.st_uid == os.geteuid() and not status.st_size and stat.S_ISREG(status.st_mode):
                warn(
                    f"{lock} is the lock of a torch extension's build, {max(0, time.time() - status.st_mtime):.0f} s "
                    f"old: ranks that load the extension wait until it is gone. If nothing builds it now, the builder "
                    f"was killed: rm {lock}"
                )


class Spawner:
    """Has the fork server start a generation's workers and its worker store, and signal them."""

    def __init__(self, config: AgentConfig, run_dir: RunDir, pump: Pump, fork_server: ForkServer) -> None:
        self._config = config
        self._run_dir = run_dir
        self._plan = config.output
        self._pump = pump
        self._tracebacks = ShownTracebacks()
        self._server = fork_server
        self._topology = read_topology(config.slots, config.environment) if config.numa_binding else None
        program = config.spec.program
        ours = program.kind is ProgramKind.COMMAND or program.interpreter == sys.executable
        # The store runs in this interpreter. Another interpreter's torch may use another version of its protocol.
        self.has_store = ours and find_spec("torch") is not None

    def start(self, group: WorkerGroup, listener: socket.socket | None) -> None:
        """Order all workers, and a worker store for `listener`. Raises OSError where the fork server is gone."""
        self._run_dir.make_memory()
        if listener:
            self._start_store(group, listener)
        for local_rank in range(group.slots):
            self._start_worker(group, local_rank)

    def signal(self, group: WorkerGroup, local_ranks: Iterable[int], signum: int) -> None:
        """Signal workers. Raises OSError where the fork server is gone.

        A Python program gets the signal alone, so that its data loaders live until its last save. A command gets it
        with its process group, since a shell does not pass it on.
        """
        is_notice = signum in self._config.notices and not self._config.has_named_signals
        to_groups = signum == signal.SIGKILL or self._config.spec.program.kind is ProgramKind.COMMAND
        self._server.signal(group.generation, sorted(local_ranks), signum, group=to_groups, is_notice=is_notice)

    def _start_store(self, group: WorkerGroup, listener: socket.socket) -> None:
        ours, theirs = wire.pair()
        ours.setblocking(False)
        group.store = ours
        with theirs, Path(os.devnull).open("r+b", 0) as null:
            fds = (null.fileno(), null.fileno(), null.fileno(), listener.fileno(), theirs.fileno())
            self._server.spawn_store(group.generation, group.table.master_addr, group.table.master_port, fds)

    def _start_worker(self, group: WorkerGroup, local_rank: int) -> None:
        theirs: list[int] = []
        link, link_end = socket.socketpair()
        link.setblocking(False)
        worker = Worker(group.rank(local_rank), local_rank, Link(group.generation, local_rank, link))
        group.workers.append(worker)
        try:
            theirs += [self._stdin(local_rank), *self._out_and_err(group, worker), link_end.detach()]
            # The worker controls its content, which may be anything of any size.
            worker.crash_fd = os.memfd_create("elaunch-crash", os.MFD_CLOEXEC)
            env, fds, binding = self._environment(group, worker), (*theirs, worker.crash_fd), self._config.numa_binding
            cpus = sorted(cpu_set(binding, local_rank, self._topology)) if binding and self._topology else None
            self._server.spawn(group.generation, local_rank, env, cpus, fds)
        finally:
            for fd in theirs:
                os.close(fd)

    def _environment(self, group: WorkerGroup, worker: Worker) -> dict[str, str]:
        config, rank, local_rank = self._config, worker.rank, worker.local_rank
        has_folder = self._run_dir.rank(group.generation, rank) is not None
        error_file = self._run_dir.error_file(group.generation, rank) if has_folder else ""
        env = environment.rank_variables(
            group.table,
            group.group_rank,
            local_rank,
            agent_store=self.has_store,
            error_file=str(error_file),
            memory=str(self._run_dir.memory or ""),
        )
        if config.virtual_local_rank:
            env |= environment.one_gpu(config.environment, local_rank)
        if size := self._terminal_size(group, worker):
            env |= environment.terminal_variables(config.environment, *size)
        return {**config.worker_env, **env, "ELAUNCH_LINK": "3"}

    def _terminal_size(self, group: WorkerGroup, worker: Worker) -> tuple[int, int] | None:
        """The columns and rows of the terminal that shows all output of a worker, less its prefix.

        None if some of it goes elsewhere, or if the worker has the terminal itself.
        """
        is_shown = self._on_console(worker) and self._pump.stdout is self._pump.stderr
        in_files_only = self._plan.redirects.of(worker.local_rank) & ~self._plan.tee.of(worker.local_rank)
        if not is_shown or not self._pump.stdout.is_terminal or self._pump.lines.is_json or in_files_only:
            return None
        if self._may_share_console(group, worker):
            return None
        columns, rows = shutil.get_terminal_size()
        prefix = len(self._prefix(group, worker).decode())
        return (columns - prefix, rows) if columns > prefix else None

    def _stdin(self, local_rank: int) -> int:
        """The worker's stdin. A terminal goes to every worker: a debugger works in any.

        Data goes only to local rank 0. If the program itself is on stdin, every worker reads it from its beginning.
        """
        if self._config.spec.program.is_on_stdin:
            return os.open("/proc/self/fd/0", os.O_RDONLY | os.O_CLOEXEC)
        # A debugger in the background would read what is typed to the shell.
        is_hidden = "ELAUNCH_DEBUG" in self._config.worker_env and os.isatty(0) and not is_in_foreground(0)
        if (local_rank == 0 or os.isatty(0)) and not is_hidden:
            with suppress(OSError):
                return os.dup(0)
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _out_and_err(self, group: WorkerGroup, worker: Worker) -> tuple[int, int]:
        if self._may_share_console(group, worker):
            is_one = os.path.samestat(os.fstat(1), os.fstat(2))
            if os.isatty(2) or not is_one:
                # A pipe goes through the pump: if its reader exits (`| head`), the worker must not see an error.
                out = self._pipe(group, worker, Streams.OUT) if is_pipe(1) else os.dup(1)
                # The only worker of a job keeps its terminal: progress bars and debuggers work as without elaunch.
                return out, os.dup(2) if os.isatty(2) else self._pipe(group, worker, Streams.ERR)
            # One pipe for both streams keeps their order, as without elaunch.
            worker.is_mixed = True
            both = self._pipe(group, worker, Streams.ERR)
            return both, os.dup(both)
        return self._pipe(group, worker, Streams.OUT), self._pipe(group, worker, Streams.ERR)

    def _may_share_console(self, group: WorkerGroup, worker: Worker) -> bool:
        """Whether the worker is the only one of its job, and all that it writes goes to the console as it is."""
        planned = self._plan.redirects.of(worker.local_rank) | self._plan.tee.of(worker.local_rank)
        is_alone = group.table.world_size == 1 and not self._pump.lines.is_json
        return is_alone and not planned and self._on_console(worker)

    def _pipe(self, group: WorkerGroup, worker: Worker, which: Streams) -> int:
        """The writing end of a new pipe, whose reading end the pump has."""
        plan, out, local_rank = self._plan, which is Streams.OUT, worker.local_rank
        name = "stdout" if out else "stderr"
        redirected, teed = bool(plan.redirects.of(local_rank) & which), bool(plan.tee.of(local_rank) & which)
        console = (self._pump.stdout if out else self._pump.stderr) if self._on_console(worker) else None
        in_file_only = redirected and not teed
        if in_file_only and self._run_dir.logs is None:
            console = None
        needles = plan.duplicate_stdout_filters if out else plan.duplicate_stderr_filters
        file = needle_file = None
        has_file = (redirected or teed) and self._run_dir.logs
        if has_file and (folder := self._run_dir.rank(group.generation, worker.rank)):
            file = LogFile(str(folder / f"{name}.log"), self._run_dir.warn, bytes_max=plan.log_bytes_max)
            if not out:
                worker.log_path = str(folder / f"{name}.log")
            if needles:
                # The generation's file for lines that match a filter. Without --tee it stays empty, as torchrun's.
                needle_file = LogFile(str(folder.parent / f"filtered_{name}.log"), self._run_dir.warn)
        frame = self._pump.lines.frame(group.generation, worker.rank, name)
        # A worker that is alone has no peer that prints the same.
        folds = not out and console and not plan.show_all_tracebacks and group.table.world_size > 1
        once = partial(self._tracebacks.once, generation=group.generation, rank=worker.rank)
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(ours, False)
        stream = WorkerStream(
            ours,
            group.generation,
            local_rank,
            console,
            b"" if frame else self._prefix(group, worker),
            keep_tail=not out,
            whole_lines=group.slots > 1,
            file=file,
            file_first=in_file_only,
            needles=tuple(needle.encode() for needle in needles) if needle_file and teed else (),
            needle_file=needle_file,
            frame=frame,
            fold=TracebackFold(partial(_is_secondary, group), once) if folds else None,
        )
        self._pump.add(stream)
        return theirs

    def _prefix(self, group: WorkerGroup, worker: Worker) -> bytes:
        if self._plan.prefix_template is None:
            return b"" if group.table.world_size == 1 else f"[{worker.rank}] ".encode()
        role = role_of(self._config.role, group.slots, worker.local_rank)
        names = {"role_name": role, "rank": str(worker.rank), "local_rank": str(worker.local_rank)}
        names["hostname"] = node_host(socket.gethostname())
        return Template(self._plan.prefix_template).safe_substitute(names).encode()

    def _on_console(self, worker: Worker) -> bool:
        local, ranks = self._plan.console_local_ranks, self._plan.console_ranks
        return (local is None or worker.local_rank in local) and (ranks is None or worker.rank in ranks)


def _is_secondary(group: WorkerGroup, text: str) -> bool | None:
    """Whether the tracebacks in `text` come from the exit of others; None while the last is incomplete."""
    return (group.is_interrupted and bool(_INTERRUPTED.search(text))) or shows_only_lost_peer(text)


@cache
def software(program: Program) -> str:
    """The software versions as text; only elaunch's if the workers' interpreter is another one, or unknown."""
    own = f"elaunch {__version__}"
    if program.interpreter != sys.executable:
        return own
    python = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
    with suppress(PackageNotFoundError):
        return f"torch {version('torch')}, {python}, {own}"
    return f"{python}, {own}"
