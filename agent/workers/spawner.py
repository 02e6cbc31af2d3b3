"""Orders one generation's workers and worker store from the fork server, each with its descriptors and environment."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Iterable

from elaunch.agent import environment
from elaunch.agent.config import AgentConfig
from elaunch.agent.forkserver import wire
from elaunch.agent.forkserver.client import ForkServer
from elaunch.agent.linux import catches, is_pending
from elaunch.agent.output.run_dir import RunDir
from elaunch.agent.workers import numa
from elaunch.agent.workers.crash_file import CrashFile
from elaunch.agent.workers.group import WorkerGroup
from elaunch.agent.workers.link import Link
from elaunch.agent.workers.stdio import Stdio
from elaunch.agent.workers.store_control import StoreControl
from elaunch.rendezvous.job_spec import ProgramKind


class Spawner:
    """Has the fork server start a generation's workers and its worker store, and signal them."""

    def __init__(self, config: AgentConfig, run_dir: RunDir, stdio: Stdio, fork_server: ForkServer) -> None:
        self._config = config
        self._run_dir = run_dir
        self._stdio = stdio
        self._server = fork_server
        self._topology = numa.read_topology(config.slots, config.environment) if config.numa_binding else None
        program = config.spec.program
        ours = program.kind is ProgramKind.COMMAND or program.interpreter == sys.executable
        # The store runs in this interpreter. Another interpreter's torch may use another version of its protocol.
        self.has_store = ours and importlib.util.find_spec("torch") is not None

    @property
    def signals_groups(self) -> bool:
        """Whether a worker is signalled with its process group, also with signals that it can handle."""
        return self._config.spec.program.kind is ProgramKind.COMMAND

    def start(self, group: WorkerGroup, listener: socket.socket | None) -> None:
        """Order all workers, and a worker store for `listener`. Raises OSError where the fork server is gone."""
        if listener:
            self._start_store(group, listener)
        for local_rank in range(group.slots):
            self._start_worker(group, local_rank)
        # The files of the last failure were kept until now: the job might have ended with it.
        self._run_dir.forget_before(group.generation)

    def signal(self, group: WorkerGroup, local_ranks: Iterable[int], signum: int) -> None:
        """Signal workers. Raises OSError where the fork server is gone.

        A Python program gets the signal alone, so that its data loaders live until its last save. A command gets it
        with its process group, since a shell does not pass it on. A scheduler's notice goes only to a worker that has a
        handler for it; another worker gets SIGTERM.
        """
        others = sorted(local_ranks)
        if signum in self._config.notices and not self._config.has_named_signals:
            noticing = [rank for rank in others if (pid := group.pids.get(rank, 0)) and catches(pid, signum)]
            # Some schedulers signal all processes. If the notice is pending in the fork server, which blocks it,
            # these workers have got it too.
            if noticing and not is_pending(self._server.pid, signum):
                self._server.signal(group.generation, noticing, signum, group=False)
            others, signum = [rank for rank in others if rank not in noticing], signal.SIGTERM
        if others:
            self._server.signal(group.generation, others, signum, group=self.signals_groups or signum == signal.SIGKILL)

    def _start_store(self, group: WorkerGroup, listener: socket.socket) -> None:
        ours, theirs = wire.pair()
        ours.setblocking(False)
        group.store = StoreControl(ours)
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            fds = (null, null, null, listener.fileno(), theirs.fileno())
            self._server.spawn_store(group.home, group.table.master_addr, group.table.master_port, fds)
        finally:
            os.close(null)
            theirs.close()

    def _start_worker(self, group: WorkerGroup, local_rank: int) -> None:
        theirs: list[int] = []
        link, link_end = socket.socketpair()
        link.setblocking(False)
        group.links[local_rank] = Link(group.generation, local_rank, link)
        try:
            theirs += [*self._stdio.standard_fds(group, local_rank), link_end.detach()]
            group.crash_files[local_rank] = CrashFile()
            theirs.append(os.dup(group.crash_files[local_rank].fileno()))
            env = self._environment(group, local_rank)
            self._server.spawn(group.home, local_rank, env, self._cpus(local_rank), tuple(theirs))
        finally:
            for fd in theirs:
                os.close(fd)

    def _environment(self, group: WorkerGroup, local_rank: int) -> dict[str, str]:
        config = self._config
        rank = group.rank(local_rank)
        has_folder = self._run_dir.rank(group.generation, rank) is not None
        error_file = self._run_dir.error_file(group.generation, rank) if has_folder else None
        if error_file:
            group.error_files[local_rank] = error_file
        env = environment.rank_variables(
            group.table,
            group.group_rank,
            local_rank,
            agent_store=self.has_store,
            error_file=str(error_file or ""),
            memory=str(self._run_dir.memory_at_start().folder or ""),
        )
        if config.virtual_local_rank:
            env |= environment.one_gpu(config.environment, local_rank)
        if size := self._stdio.terminal_size(group, local_rank):
            env |= environment.terminal_variables(config.environment, *size)
        return {**config.worker_env, **env, "ELAUNCH_LINK": "3"}

    def _cpus(self, local_rank: int) -> list[int] | None:
        if not self._config.numa_binding or not self._topology:
            return None
        return sorted(numa.cpu_set(self._config.numa_binding, local_rank, self._topology))
