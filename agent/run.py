"""The agent's entry point: the launcher begins an agent early, and runs it when it has the job's store.

Importing this module is cheap, and the order in `begin` is for speed: the user waits for the fork server's import of
torch, so that starts first, and the agent's own modules are imported meanwhile.
"""

from __future__ import annotations

import gc
import os
import socket
import termios
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elaunch.agent.config import AgentConfig, CannotRun
from elaunch.agent.forkserver.client import ForkServer
from elaunch.agent.guardian.client import GuardianClient
from elaunch.agent.linux import is_in_foreground
from elaunch.agent.output.run_dir import Places, RunDir, new_places
from elaunch.rendezvous.format import node_host

if TYPE_CHECKING:
    from elaunch.agent.serve.event_hook import EventHook
    from elaunch.agent.workers.manager import Services
    from elaunch.rendezvous.store import Store
    from elaunch.rendezvous.types import Outcome

_OUTPUT_WAIT_S = 2.0
_UNREAD = "stopped; some output is lost, since the console or the reader of the pipe did not read it"


@contextmanager
def begin(config: AgentConfig) -> Iterator[AgentRun]:
    """Start the guardian and the fork server, and end both after the `with`. Raises CannotRun and OSError.

    Whatever is raised, no process and no private folder of the agent is left.
    """
    # Before anything is made that would have to be removed.
    places = new_places()
    with ExitStack() as cleanup:
        if "ELAUNCH_DEBUG" in config.worker_env and os.isatty(0):
            cleanup.callback(_restore_terminal, termios.tcgetattr(0))
        guardian = GuardianClient((*places.private, *places.memory, *places.socket), config.environment)
        cleanup.callback(guardian.finish)
        metrics = _metrics_listener(config)
        troubles: list[str] = []
        warn = troubles.append
        # Folders are created until the exit; once the pump runs, it logs the warnings.
        run_dir = _run_dir(config, lambda trouble: warn(trouble), places)
        form = config.output.log_format.value
        form = "timed" if form == "text" and not os.isatty(2) else form
        guardian.note(pid=os.getpid(), host=node_host(socket.gethostname()), form=form)
        environment = guardian.environment(config.environment)
        fork_server = _fork_server(config, environment)
        # The loop stops it too; a second stop does nothing.
        cleanup.callback(fork_server.stop)

        # From here on the fork server imports torch on another core.
        from elaunch.agent.output.pump import Pump
        from elaunch.agent.own_lines import OwnLines
        from elaunch.agent.serve.event_hook import EventHook
        from elaunch.agent.workers.manager import Services

        pump = Pump(OwnLines(config.output.log_format, has_terminal=os.isatty(2)), config.output.least)
        pump.start()
        warn = partial(pump.log, level="warning")
        hook = EventHook(config.on_event, config.environment, pump.log) if config.on_event else None
        agent = AgentRun(Services(config, guardian, fork_server, pump, run_dir), hook, metrics)
        try:
            for detail in config.details:
                pump.log(detail, "debug")
            for trouble in (*config.notes, *troubles):
                pump.log(trouble, "warning")
            if fork_server.how:
                pump.log(fork_server.how, "debug" if fork_server.is_warm else "info")
            yield agent
        except BaseException:
            # The pump's lines come before the error's text.
            pump.close(timeout_s=_OUTPUT_WAIT_S)
            raise


def _fork_server(config: AgentConfig, environment: Mapping[str, str]) -> ForkServer:
    preload, text = config.preload, config.text
    if preload is not None:
        preload = () if text.is_refused else tuple(name for name in preload if name not in text.unused)
    return ForkServer(
        config.spec.program, preload, environment, config.ignored, packages=text.packages, warm_s=config.warm_s
    )


class AgentRun:
    """An agent that has begun: its fork server imports. The launcher writes to `pump`, and reads `run_dir`.

    A process with the environment `marked(environ)` ends with the agent.
    """

    def __init__(self, services: Services, hook: EventHook | None, metrics: socket.socket | None) -> None:
        self._services, self._hook, self._metrics = services, hook, metrics
        self.pump, self.run_dir, self.marked = services.pump, services.run_dir, services.guardian.environment

    def warn(self, line: str) -> None:
        """Log one line of elaunch's own at level warning."""
        self.pump.log(line, "warning")

    def run(
        self, config: AgentConfig, store: Store, *, is_remote: bool, served_pid: int | None, locator: str = ""
    ) -> Outcome:
        """Take part in the job until its outcome is known; all workers have exited then. Raises CannotRun.

        `config` is that of `begin`, now with this node's address and network. `is_remote`: `store` is in another
        process; `served_pid` is that process where this agent's launcher has started it. `locator` is JSON by which
        another process of this user reaches that store, for `elaunch status`.
        """
        from elaunch.agent.loop import Loop
        from elaunch.agent.session.store_view import JobStore
        from elaunch.rendezvous.rules.snapshot import Keys

        job_store = JobStore(store, Keys(config.spec.run_id, config.store_prefix), is_remote)
        services = replace(self._services, config=config)
        loop = Loop(services, job_store, served_pid, locator, self._hook, self._metrics)
        # The objects that exist now are never freed, so the collector need not scan them.
        gc.freeze()
        gc.enable()
        return loop.run()

    def finish_output(self, outcome: Outcome) -> None:
        """Wait until all is written and the hook has run; after an interruption for 2 s only, since the user waits."""
        from elaunch.rendezvous.types import OutcomeKind

        if self._hook:
            self._hook.close()
        if not self.pump.close(timeout_s=_OUTPUT_WAIT_S if outcome.kind is OutcomeKind.INTERRUPTED else None):
            os.set_blocking(2, False)
            with suppress(OSError):
                os.write(2, self.pump.lines.line(_UNREAD, "warning"))


def _restore_terminal(settings: list[Any]) -> None:
    """A worker may have been killed at a debugger's prompt. In the background SIGTTOU would stop this process."""
    with suppress(OSError, termios.error):
        if is_in_foreground(0):
            termios.tcsetattr(0, termios.TCSADRAIN, settings)


def _metrics_listener(config: AgentConfig) -> socket.socket | None:
    if not config.metrics:
        return None
    from elaunch.agent.serve.metrics import listen

    host, port = config.metrics
    try:
        return listen(host, port)
    except OSError as error:
        # The error of a name that cannot be resolved has a number below 0, for which strerror has no text.
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise CannotRun(
            f"--metrics-port {port}: {host}:{port} cannot be served ({why}); choose another address, or port 0 for"
            " any free one"
        ) from error


def _run_dir(config: AgentConfig, warn: Callable[[str], None], places: Places) -> RunDir:
    # Nodes may share a disk, so the folder's name has the node.
    node = f"_{node_host(socket.gethostname())}" if config.spec.nodes_max > 1 else ""
    log_dir = config.output.log_dir
    try:
        if config.output.makes_log_dir:
            import tempfile

            log_dir = Path(tempfile.mkdtemp(prefix="elaunch_logs_"))
        return RunDir(log_dir, f"{config.spec.run_id}{node}", warn, places)
    except OSError as error:
        where = f"--log-dir {log_dir}: no folder can be made in it" if log_dir else "no temporary folder can be made"
        raise CannotRun(f"{where} ({error.strerror}); choose another: --log-dir DIR") from error
