"""The agent's event loop: every event goes from the inbox through `core.step`, whose actions are carried out.

source (posts only)                             event
`Inbox.catch`: the agent's signals              Signalled
`Pump`: stdout is closed                        Signalled, as SIGPIPE
`StatusServer`: elaunch stop, elaunch restart   Signalled, RestartOrdered
`Session`, from its thread                      SnapshotPending (taken as SnapshotChanged), Leased, LeaseLost,
                                                Committed, StoreFailed, StoreBack, StoreLost
`Workers`: the fork server's socket             WorkerExited, GroupFailed; Signalled, from a rank to its parent
`Workers.links`: the workers' links             WorkerEnded, WorkerListens, WorkerSaving, WorkerSaved, WorkerStopped
`Workers`, its observers: every 5 s             Sampled
`Loop._wait`: `core.step.deadline_s`            Tick

action (`Loop._act`)                            executor, and the event that follows
Commit, Join, Renew                             `Session`: Committed, Committed, Leased
Widen                                           `Session`
Log                                             `Pump`
Spawn, SignalWorkers                            `Workers`, through the fork server
Clear, ReplaceForkServer                        `Workers`: Cleared, GroupFailed
NotifyWorkers                                   `Workers.links`
TakeStacks, Blame                               `Workers`, its observers: StacksTaken, GroupFailed
NameThreads, KeepStacks                         `Workers`, its observers
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from elaunch import __version__
from elaunch.agent.config import OnHang
from elaunch.agent.core.actions import Action, Commit, Join, Log, Renew, Widen
from elaunch.agent.core.events import Event, Signalled, SnapshotPending, Tag, Tick
from elaunch.agent.core.state import Agent, Clearing, Exited, Running, Stopping
from elaunch.agent.core.step import deadline_s, step
from elaunch.agent.core.timeline import NO_GENERATION, SCHEMA_VERSION, Entry, announcements, entries
from elaunch.agent.output.run_dir import TIMELINE, Timeline
from elaunch.agent.serve.event_hook import EventHook
from elaunch.agent.serve.kubeflow import ProgressPoster
from elaunch.agent.serve.status_server import LocalSocket, StatusServer
from elaunch.agent.session.session import Session
from elaunch.agent.session.store_view import JobStore, LocalHost
from elaunch.agent.workers.exits import signal_name
from elaunch.agent.workers.group import Reporter
from elaunch.agent.workers.manager import Services, Workers
from elaunch.agent.workers.spawn import software
from elaunch.process_identity import this_process
from elaunch.rendezvous.format import node_host
from elaunch.rendezvous.rules.snapshot import Snapshot
from elaunch.rendezvous.rules.transactions import end_job, join
from elaunch.rendezvous.types import Failure, FailureKind, Joined, Node, Outcome, OutcomeKind, called

_GUARDIANS_MAX = 20
# Pending writes are flushed for at most this long: the user waits for the prompt.
_FLUSH_S = 2.0
# A store that exits with this agent runs for this much longer, so that the other agents read how the job ended.
_OUTLAST_S = 3.0
_IDLE = "they were idle for the time of --children-grace, or ran for 60 times as long"
# epoll refuses a wait of more than 24 days.
_WAIT_MAX_S = 86_400.0


class Inbox:
    """A queue of events. Its `fileno` is readable when an event is queued.

    `post` may be called from any thread. `catch` turns signals into events; the handlers do nothing else.
    """

    def __init__(self) -> None:
        self._events: deque[Event | SnapshotPending] = deque()
        # A byte is a signal's number, or 0 to wake the loop.
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._caught: list[int] = []

    def fileno(self) -> int:
        return self._wake_r

    def post(self, event: Event | SnapshotPending) -> None:
        self._events.append(event)
        # Whoever takes the first event takes those behind it too. So the pipe always has room for a signal.
        if len(self._events) == 1:
            os.write(self._wake_w, b"\0")

    def take(self) -> Event | SnapshotPending | None:
        """The next event, or None."""
        with suppress(BlockingIOError):
            for signum in filter(None, os.read(self._wake_r, 4096)):
                self._events.append(Signalled(signum, signal.Signals(signum).name))
        return self._events.popleft() if self._events else None

    def catch(self, signums: Iterable[int]) -> None:
        """Turn these signals into events; one that is ignored stays so (SIGHUP under nohup)."""
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        for signum in signums:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, lambda *_: None)
                self._caught.append(signum)

    def release(self) -> None:
        """Restore the signals' defaults: from here on they end this process."""
        signal.set_wakeup_fd(-1)
        for signum in self._caught:
            signal.signal(signum, signal.SIG_DFL)


class Loop:
    """One agent's event loop, from joining the job to its outcome.

    `served_pid` is the process by which this agent serves the job's store, if it does. `locator` as in `StatusServer`.
    `hook` runs the user's command for events. Prometheus connects to the listening socket `metrics`.
    """

    def __init__(
        self,
        services: Services,
        job_store: JobStore,
        served_pid: int | None = None,
        locator: str = "",
        hook: EventHook | None = None,
        metrics: socket.socket | None = None,
    ) -> None:
        config, run_dir, pump = services.config, services.run_dir, services.pump
        self._config = config
        self._served_pid = served_pid
        self._guardian = services.guardian
        self._fork_server = services.fork_server
        self._pump = pump
        self._hook = hook
        self._inbox = Inbox()
        pump.when_stdout_closed(lambda: self._inbox.post(Signalled(signal.SIGPIPE, "SIGPIPE")))
        self._timeline = Timeline(run_dir.logs, run_dir.warn, pump.do)
        host = node_host(socket.gethostname())
        self._session = Session(job_store, LocalHost(host), config.times, self._inbox.post)
        # The session names each incarnation of this node.
        place = config.role, config.node_rank, config.topology
        self._agent = Agent(
            Node("", host, config.master_addr, config.slots, this_process(), *place),
            config.spec,
            config.times,
            Snapshot(job_store.keys),
            config.notices,
            restarts_hung=config.on_hang is OnHang.RESTART,
            called=called(config.spec.run_id, os.getpid()),
            logs=str(run_dir.logs or ""),
            invitation=config.invitation,
            only_here=config.only_here,
        )
        self._selector = selectors.DefaultSelector()
        warn = partial(pump.log, level="warning")
        reporter = Reporter(self._inbox.post, pump.log, warn, self._timeline, self._node_failure)
        # During an operation that takes seconds the lease is renewed.
        self._workers = Workers(services, reporter, self._selector, lambda: self._session.tick(time.monotonic()))
        post, offer = self._inbox.post, self._session.offer
        self._status = StatusServer(lambda: self._agent, self._workers.seen, offer, locator, time.monotonic(), post)
        self._run_dir = run_dir
        if metrics:
            self._serve_metrics(metrics)
        self._poster = ProgressPoster(config.environment, partial(reporter.warn_once, "kubeflow"))
        self._timeline.observers.append(self._poster.observe)

    def _serve_metrics(self, listener: socket.socket) -> None:
        # prometheus_client is optional.
        from elaunch.agent.serve.metrics import NodeState, RunCounters, serve, url

        counters, started_at = RunCounters(time.monotonic()), time.time()
        self._timeline.observers.append(counters.count)

        def read() -> NodeState:
            workers = self._workers
            return NodeState(self._agent, counters, workers.steps(), workers.links.steps_per_s, started_at)

        serve(listener, read)
        # A fixed port is known to the user.
        is_ephemeral = self._config.metrics is not None and self._config.metrics[1] == 0
        self._pump.log(f"metrics of this node: {url(listener)}", "info" if is_ephemeral else "debug")

    def run(self) -> Outcome:
        """Run until the outcome is known and all workers have exited."""
        self._stamp_start()
        if (host := self._agent.me.host) != (name := socket.gethostname()):
            self._pump.log(
                f"this host's name, {name!r}, has characters that store keys and log lines cannot have: this job uses"
                f" {host} instead",
                "warning",
            )
        self._inbox.catch(self._config.signals)
        self._selector.register(self._inbox, selectors.EVENT_READ)
        self._selector.register(self._guardian, selectors.EVENT_READ, self._replace_guardian)
        if self._served_pid is not None:
            self._watch_store_process(self._served_pid)
        self._session.open()
        listening = LocalSocket(self._run_dir.socket_folders(), self._selector, self._status.handle)
        try:
            outcome = self._run_to_outcome()
            self._end_served_job(outcome)
            self._await_orphans(outcome)
            if line := self._fork_server.stay():
                self._pump.log(line)
        finally:
            listening.close()
            self._fork_server.stop()
            self._session.close(_FLUSH_S, _OUTLAST_S if self._served_pid is not None else 0.0)
            self._poster.close()
        self._inbox.release()
        return outcome

    def _end_served_job(self, outcome: Outcome) -> None:
        """If this host serves the store, end the job in it: the other agents would wait for a store that has exited."""
        snapshot = self._agent.snapshot
        if self._served_pid is None or snapshot.ended or snapshot.generation is None:
            return
        why = f"{self._agent.me.host}, which served the job's store, has exited: {outcome.reason}"
        ended = replace(outcome, kind=OutcomeKind.UNKNOWN, reason=why, failure=None)
        self._session.commit(end_job(snapshot, ended), None)

    def _await_orphans(self, outcome: Outcome) -> None:
        """Let the workers' orphans run, if the job has succeeded; any signal ends them.

        All nodes have the outcome already.
        """
        why = "" if outcome.kind is OutcomeKind.SUCCEEDED else "the job has not succeeded"
        while not why and self._workers.orphans_may_run(time.monotonic()):
            event = self._inbox.take()
            if isinstance(event, Signalled):
                why = event.name
            elif event is None:
                self._wait()
        self._workers.end_orphans(why or _IDLE)

    def _run_to_outcome(self) -> Outcome:
        while not isinstance(self._agent.phase, Exited):
            event = self._inbox.take()
            if event is None:
                self._wait()
            elif isinstance(event, SnapshotPending):
                event = self._session.snapshot()
            if event and isinstance(self._agent.phase, Running):
                # How workers are stopped depends on what they have reported.
                self._workers.links.read_all()
            for reported in self._workers.links.take_messages():
                self._take(reported)
            if event:
                self._take(event)
        return self._agent.phase.outcome

    def _take(self, event: Event) -> None:
        before, (self._agent, actions) = self._agent, step(self._agent, event, time.monotonic())
        happened = [*entries(before, self._agent, event)]
        for entry in happened:
            if entry.event == "opened":
                self._pump.lines.generation = entry.generation
            self._timeline.stamp(entry.generation, entry.event, **entry.fields)
        if self._hook:
            for announcement in announcements(self._agent, happened):
                self._hook.notify(self._message(announcement))
        self._status.note(self._agent.snapshot.query)
        for action in actions:
            self._act(action)

    def _message(self, announcement: Entry) -> dict[str, object]:
        return {
            "event": announcement.event,
            "schema": SCHEMA_VERSION,
            "at": time.time(),
            "run_id": self._config.spec.run_id,
            "node": self._agent.me.host,
            "generation": announcement.generation,
            **announcement.fields,
            **({"logs": str(self._run_dir.logs)} if self._run_dir.logs else {}),
        }

    def _stamp_start(self) -> None:
        if self._run_dir.logs:
            self._guardian.note(timeline=str(self._run_dir.logs / TIMELINE))
        config, spec, cwd = self._config, self._config.spec, ""
        with suppress(OSError):
            cwd = os.getcwd()  # noqa: PTH109
        self._timeline.stamp(
            NO_GENERATION,
            "started",
            schema=SCHEMA_VERSION,
            version=__version__,
            run_id=spec.run_id,
            host=self._agent.me.host,
            pid=os.getpid(),
            workers=config.slots,
            gpus=config.gpus,
            command=spec.terms.command,
            cwd=cwd,
            nodes_min=spec.nodes_min,
            nodes_max=spec.nodes_max,
            max_restarts=spec.max_restarts,
            utc_offset_s=time.localtime().tm_gmtoff,
        )

    def _wait(self) -> None:
        due_s = deadline_s(self._agent)
        timers_s = (due_s, self._workers.due_s, self._session.due_s, self._status.due_s)
        wanted_s = [at_s for at_s in timers_s if at_s is not None]
        timeout_s = max(0.0, min(min(wanted_s) - time.monotonic(), _WAIT_MAX_S)) if wanted_s else None
        for key, _ in self._selector.select(timeout_s):
            if key.data:
                key.data()
        now_s = time.monotonic()
        self._session.tick(now_s)
        self._status.tick(now_s)
        if due_s is not None and now_s >= due_s:
            self._inbox.post(Tick())
        self._workers.tick(now_s)

    def _act(self, action: Action) -> None:
        match action:
            case Commit(txn, tag):
                self._session.commit(txn, tag)
            case Join():
                self._join(action)
            case Renew():
                self._session.renew()
            case Widen():
                self._session.widen()
            case Log(text, level):
                self._pump.log(text, level)
            case _:
                phase = self._agent.phase
                is_ending = isinstance(phase, (Stopping, Clearing)) and phase.then is not None
                self._workers.act(action, is_ending=is_ending)

    def _join(self, order: Join) -> None:
        me = self._agent.me
        port, secret = self._workers.port.reserve(), os.urandom(16).hex()
        versions = software(self._config.spec.program) if self._config.spec.nodes_max > 1 else ""
        joined = Joined(me.node_id, port, order.progressed, versions, secret)
        txn = join(self._agent.snapshot, me, joined, order.lease, is_member=order.is_member)
        self._session.commit(txn, Tag.JOIN)

    def _node_failure(self, kind: FailureKind, generation: int, message: str) -> Failure:
        me = self._agent.me
        return Failure(kind, generation, me.node_id, me.host, -1, -1, -1, None, message, failed_at=time.time())

    def _watch_store_process(self, pid: int) -> None:
        """Log why the store's process has exited, which no other agent can find out."""
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            # A container's seccomp profile may refuse it: nothing is logged then.
            return

        def ended() -> None:
            self._selector.unregister(fd)
            os.close(fd)
            self._served_pid = None
            how = _how_it_ended(pid)
            if how.endswith(signal.SIGKILL.name) and (oom := self._workers.exits.oom_text(pid)):
                how = f"{how} ({oom})"
            text = f"the job's store, which this host served (pid {pid}), {how}; the workers continue, without restarts"
            self._pump.log(text, "error")

        self._selector.register(fd, selectors.EVENT_READ, ended)

    def _replace_guardian(self) -> None:
        self._selector.unregister(self._guardian)
        why = "it keeps exiting"
        if self._guardian.restarts < _GUARDIANS_MAX:
            self._pump.log("the guardian was killed; starting another", "warning")
            try:
                self._guardian.restart()
            except OSError as error:
                why = error.strerror or str(error)
            else:
                self._selector.register(self._guardian, selectors.EVENT_READ, self._replace_guardian)
                return
        self._pump.log(f"the guardian cannot be replaced ({why}): kill -9 may leave processes behind", "warning")


def _how_it_ended(pid: int) -> str:
    """How a child has exited, as the end of a sentence. The child is left for others to reap."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None or found.si_code == os.CLD_EXITED:
        return f"exited with code {found.si_status}" if found else "ended"
    return f"was killed by {signal_name(-found.si_status)}"
