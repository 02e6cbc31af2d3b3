"""The hands that hold one generation's workers: pipes, links, the worker store, and what a dead one leaves."""

from __future__ import annotations

import importlib.util
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace

from elaunch.agent import environment
from elaunch.agent.config import AgentConfig
from elaunch.agent.core.events import WorkerExited
from elaunch.agent.core.failures import Place, Remains, failure_of
from elaunch.agent.forkserver import wire
from elaunch.agent.forkserver.client import ForkServer
from elaunch.agent.linux import catches, is_pending
from elaunch.agent.output.pump import Pump
from elaunch.agent.output.run_dir import RunDir
from elaunch.agent.workers import numa
from elaunch.agent.workers.error_file import read_error_file
from elaunch.agent.workers.group import Group
from elaunch.agent.workers.link import Link
from elaunch.agent.workers.oom import OutOfMemoryWatch
from elaunch.agent.workers.stdio import Outputs
from elaunch.rendezvous.types import ProgramKind

_STORE_ANSWER_S = 0.5


class Workers:
    """Starts groups through a fork server and reads what is left of their workers."""

    def __init__(self, config: AgentConfig, host: str, pump: Pump, run_dir: RunDir) -> None:
        self._config = config
        self._host = host
        self._outputs = Outputs(config, pump, run_dir)
        self._run_dir = run_dir
        self._kernel = OutOfMemoryWatch()
        self._topology = numa.read_topology(config.slots, config.environment) if config.numa_binding else None
        program = config.spec.program
        ours = program.kind is ProgramKind.COMMAND or program.interpreter == sys.executable
        # The store's process is this interpreter's; another one's torch may speak another version of its protocol.
        self.has_store = ours and importlib.util.find_spec("torch") is not None

    def start(self, server: ForkServer, group: Group, listener: socket.socket | None) -> None:
        """Order the store, if it is this node's, and all workers. Raises OSError where the fork server is gone.

        `listener` is the reserved port's socket. It is closed here where no store can take it over: rank 0 will bind.
        """
        if listener and group.group_rank == 0 and self.has_store:
            self._start_store(server, group, listener)
        elif listener:
            listener.close()
        for local_rank in range(group.slots):
            self._start_worker(server, group, local_rank)
        # The last failure's files were there until now, in case that it had been the job's last.
        self._run_dir.forget_before(group.generation)

    def signal(self, server: ForkServer, group: Group, local_rank: int, signum: int) -> None:
        """Signal one worker.

        A Python program gets it alone, so that its data loaders outlive its last save; a command with its group, since
        a shell does not pass on what it gets. A scheduler's notice is for who has a handler for it.
        """
        if signum in self._config.notices and not self._config.has_named_signals:
            pid = group.pids.get(local_rank, 0)
            if pid and catches(pid, signum):
                # Some schedulers tell all processes: the fork server, which blocks it, and this worker too.
                if not is_pending(server.pid, signum):
                    server.signal(group.generation, local_rank, signum, group=False)
                return
            signum = signal.SIGTERM
        whole_group = self._config.spec.program.kind is ProgramKind.COMMAND or signum == signal.SIGKILL
        server.signal(group.generation, local_rank, signum, group=whole_group)

    def exited(self, group: Group, local_rank: int, pid: int, code: int) -> WorkerExited:
        """What an exit means."""
        link = group.links.get(local_rank)
        if link:
            link.read()
        if code == 0:
            return WorkerExited(group.generation, local_rank, 0)
        error_file = group.error_files.get(local_rank)
        record = read_error_file(error_file) if error_file else None
        kernel = self._kernel.word_on(pid) if code == -signal.SIGKILL else ""
        progressed = True if link and link.step >= 0 else link.reached_store if link else None
        place = Place(group.generation, group.node_id, self._host, group.rank(local_rank), local_rank, pid)
        raised = link is not None and link.raised
        remains = Remains(code, record or "", kernel=kernel, progressed=progressed, raised=raised)
        failure = failure_of(place, remains, signal_name(code), time.time())
        failure = replace(
            failure,
            log_path=group.log_files.get(local_rank, ""),
            error_file="" if record is None else str(error_file),
        )
        return WorkerExited(group.generation, local_rank, code, failure)

    def close_store(self, group: Group) -> None:
        """End the group's worker store, and learn from it whether a rank had come that far."""
        store, group.store = group.store, None
        if store is None:
            return
        with store, suppress(OSError):
            if not self.hear_store(group, store):
                return
            wire.send(store, {"op": "end"})
            select.select([store], [], [], _STORE_ANSWER_S)
            answer = wire.receive(store)
            group.reached_store = answer is not None and answer[0]["keys"] > 0

    def hear_store(self, group: Group, store: socket.socket) -> bool:
        """Take the store's one word, if it has come; whether the store is up."""
        if not group.store_up and not group.store_error:
            with suppress(OSError):
                if news := wire.receive(store):
                    group.store_up = "up" in news[0]
                    group.store_error = news[0].get("error", "")
        return group.store_up

    def store_error(self, group: Group) -> str:
        """What a worker store that ended had to say, in words."""
        store, group.store = group.store, None
        if store is not None:
            with store:
                self.hear_store(group, store)
        return f"failed: {group.store_error}" if group.store_error else ""

    def _start_store(self, server: ForkServer, group: Group, listener: socket.socket) -> None:
        group.store, theirs = wire.pair()
        group.store.setblocking(False)
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            fds = (null, null, null, listener.fileno(), theirs.fileno())
            server.spawn_store(group.home, group.table.master_addr, group.table.master_port, fds)
        finally:
            os.close(null)
            theirs.close()

    def _start_worker(self, server: ForkServer, group: Group, local_rank: int) -> None:
        theirs: list[int] = []
        link, link_end = socket.socketpair()
        link.setblocking(False)
        group.links[local_rank] = Link(group.generation, local_rank, link)
        try:
            theirs += [*self._outputs.standard_fds(group, local_rank), link_end.detach()]
            env = self._environment(group, local_rank)
            server.spawn(group.home, local_rank, env, self._cpus(local_rank), tuple(theirs))
        finally:
            for fd in theirs:
                os.close(fd)

    def _environment(self, group: Group, local_rank: int) -> dict[str, str]:
        config = self._config
        folder = self._run_dir.rank(group.generation, group.rank(local_rank))
        if folder:
            group.error_files[local_rank] = folder / "error.json"
        env = environment.rank_variables(
            group.table,
            group.group_rank,
            local_rank,
            agent_store=self.has_store,
            error_file=str(folder / "error.json") if folder else "",
            memory=str(self._run_dir.memory.folder or ""),
        )
        if config.virtual_local_rank:
            env |= environment.one_gpu(config.environment, local_rank)
        return {**config.worker_env, **env, "ELAUNCH_LINK": "3"}

    def _cpus(self, local_rank: int) -> list[int] | None:
        if not self._config.numa_binding or not self._topology:
            return None
        return sorted(numa.cpu_set(self._config.numa_binding, local_rank, self._topology))


def signal_name(code: int) -> str:
    """The name of the signal that an exit code of minus its number tells of."""
    try:
        return signal.Signals(-code).name if code < 0 else ""
    except ValueError:
        return f"signal {-code}"
