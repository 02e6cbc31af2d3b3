"""The command `elaunch`: parse, start the agent, connect to the store, run the agent, report, exit.

The agent starts as soon as the options are known: its fork server's import of torch takes the longest. Modules that
are needed later are imported meanwhile.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeAlias

import click
from click.shell_completion import shell_complete

from elaunch.agent.config import AgentConfig, CannotRun, LogFormat
from elaunch.agent.own_lines import OwnLines
from elaunch.interrupts import end_at_ctrl_c, raise_at_ctrl_c
from elaunch.launcher.agent_config import agent_config, topology_of
from elaunch.launcher.doctor.host import check_open_files, health_check, site_check
from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.host import detect, environ_at_start
from elaunch.launcher.options.command_line import COMMANDS, ELAUNCH, ParseState
from elaunch.launcher.options.options import Options, load_job_file
from elaunch.launcher.pid1 import become_init
from elaunch.launcher.preflight import check_options, read_secret, take_program_from_stdin
from elaunch.launcher.schedulers.defaults import cluster_of, facts_of_job, settle
from elaunch.launcher.schedulers.detect import HOSTS
from elaunch.launcher.schedulers.facts import Cluster
from elaunch.launcher.schedulers.other_tasks import hold_other_tasks, wait_for_agent
from elaunch.launcher.store.locate import Planned, plan
from elaunch.rendezvous.format import shortage
from elaunch.rendezvous.types import UNNAMED

if TYPE_CHECKING:
    from elaunch.agent.run import AgentRun
    from elaunch.rendezvous.types import Outcome

OnOutcome: TypeAlias = "Callable[[Outcome, AgentConfig, AgentRun], None]"
_TRAINER = "elaunch.trainer"
_COMPLETE = "_ELAUNCH_COMPLETE"
# Two digits after the point are shown.
_HOURS_MIN = 0.01
# All other commands print their output and exit. Their reader may close the pipe early (`| head`).
_NOT_PRINTERS = ("run", "store")


def main() -> NoReturn:
    """The entry point.

    Exit codes: 0, 1 the job failed, 2 usage, 3 the store or an address is unavailable, 128 + n ended by signal n; for a
    failed job also one of --no-restart-codes.
    """
    as_command(_main)


def as_command(work: Callable[[], int]) -> NoReturn:
    """Run `work` as the whole of this process, which exits with the code that `work` returns."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # Started with a closed standard stream: a pipe of ours must not get its number.
            os.open(os.devnull, os.O_RDWR)
    if os.getpid() == 1:
        become_init()
    try:
        raise_at_ctrl_c()
        code = work()
    except KeyboardInterrupt:
        # Until the agent handles signals, only this process, and children that die with it, have to stop.
        end_at_ctrl_c()
        code = 130
    except BrokenPipeError:
        if not {*COMMANDS}.difference(_NOT_PRINTERS).intersection(sys.argv[1:2]):
            raise
        code = 0
    try:
        # stdout is None if the command was started with it closed.
        if sys.stdout:
            sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes the buffer again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(code)


def _main() -> int:
    try:
        if shell := os.environ.get(_COMPLETE):
            if shell_complete(ELAUNCH, {"obj": ParseState()}, "elaunch", _COMPLETE, shell):
                raise UsageError(f"{_COMPLETE}={shell} is not known; use bash_source, zsh_source or fish_source")
            return 0
        with ELAUNCH.make_context("elaunch", sys.argv[1:], obj=ParseState(os.environ, load_job_file)) as ctx:
            found: Options | int = ELAUNCH.invoke(ctx)
        if isinstance(found, int):
            return found
        if found.module and found.target == _TRAINER and not {"-h", "--help"}.isdisjoint(found.args):
            # A job would first import torch, for workers that only print the help.
            os.execv(sys.executable, (sys.executable, "-m", _TRAINER, "--help"))
        return run(found, environ_at_start(os.environ))
    except click.exceptions.Exit as done:
        return done.exit_code
    except (click.ClickException, UsageError, SiteError, OSError, RuntimeError, MemoryError) as error:
        is_usage = isinstance(error, click.ClickException | UsageError)
        sentence = str(error) if is_usage or isinstance(error, SiteError) else shortage(error)
        if sentence is None:
            raise
        _log_line(LogFormat.PLAIN, sentence, "error")
        return 2 if is_usage else 3


def show_report(outcome: Outcome, config: AgentConfig, agent: AgentRun) -> None:
    """Write the report about the ended job to stderr."""
    from elaunch.launcher.report import record, report

    logs = agent.run_dir.logs
    if logs and not logs.is_dir():
        agent.warn(f"the workers' output was in {logs}, and that folder was removed")
        logs = None

    def write() -> None:
        text = report(outcome, config.spec, logs, agent.run_dir.is_incomplete)
        hours = _hours(logs) if text and logs else ""
        agent.pump.write_report(text + hours, record(outcome, logs))

    # In the pump's thread, which has written the timeline then.
    agent.pump.do(write)


def _hours(logs: Path) -> str:
    """A line with the workers' hours; empty for a few seconds, or if this node's timeline cannot be read."""
    from elaunch.launcher.inspect.history import goodput, history
    from elaunch.launcher.inspect.node_log import TIMELINE, node_log

    with suppress(OSError, ValueError), (logs / TIMELINE).open("rb") as lines:
        found = goodput(history([node_log(str(logs), lines)]))
        if found.used_h + found.lost_h >= _HOURS_MIN:
            return f"elaunch: {found.hours}\n"
    return ""


def run(options: Options, environ: Mapping[str, str], on_outcome: OnOutcome = show_report) -> int:
    """Run the job of `options`. Returns its exit code. Raises UsageError if it cannot start as requested.

    `on_outcome` is called once, when the job has ended. Whatever is raised, no process and no folder of ours is left.
    """
    if (options.hosts or options.hostfile or options.dry_run) and options.scheduler != HOSTS:
        if on_outcome is not show_report:
            raise UsageError("--hosts is for jobs alone, and this command works on one host; leave it out")
        from elaunch.launcher.hosts.command import run_on_hosts

        return run_on_hosts(options, environ, partial(_log_line, options.log_format))
    cluster = cluster_of(options, environ)
    if cluster is None or cluster.tasks == 1:
        return _run_agent(options, environ, cluster, on_outcome)
    log = partial(_log_line, options.log_format)
    if cluster.task > 0:
        return wait_for_agent(cluster, log)
    with hold_other_tasks(cluster, log):
        return _run_agent(options, environ, cluster, on_outcome)


def _run_agent(options: Options, environ: Mapping[str, str], cluster: Cluster | None, on_outcome: OnOutcome) -> int:
    options, planned, config = _prepared(options, environ, cluster)
    # Imported here, like all that only a job needs: other commands start faster.
    from elaunch.agent.run import begin

    try:
        with begin(config) as agent, _health(options, environ, config, agent):
            # From here on the fork server imports torch on another core.
            from elaunch.launcher.report import write_error_file

            outcome = _outcome(options, planned, config, agent)
            on_outcome(outcome, config, agent)
            write_error_file(outcome, environ.get("TORCHELASTIC_ERROR_FILE"), agent.run_dir.error_file)
            agent.finish_output(outcome)
    except CannotRun as error:
        raise UsageError(str(error)) from error
    return outcome.exit_code


def _health(
    options: Options, environ: Mapping[str, str], config: AgentConfig, agent: AgentRun
) -> AbstractContextManager[None]:
    """This node's health checks, if they are enabled. Raises SiteError."""
    if options.health_command:
        site_check(options.health_command, agent.marked(config.environment), agent.pump.log)
    is_default = "health_check" not in options.given
    has_gpu = os.path.exists("/dev/nvidiactl")  # noqa: PTH110
    if options.health_check == "off" or (is_default and config.spec.nodes_max == 1 and not has_gpu):
        # A job of one node without a GPU fails immediately, with the reason, where the check would only warn.
        return nullcontext()
    return health_check(config.slots, environ, agent.warn, is_strict=options.health_check == "strict")


def _prepared(
    options: Options, environ: Mapping[str, str], cluster: Cluster | None
) -> tuple[Options, Planned, AgentConfig]:
    """Decide everything before anything is started, the job's name included. Raises UsageError."""
    check_options(options, environ)
    if cluster:
        cluster = facts_of_job(options, cluster, environ)
        options = settle(options, cluster)
    planned = plan(options, environ, read_secret, cluster)
    if options.run_id is None:
        options = replace(options, run_id=os.urandom(4).hex() if planned.plan.is_alone else UNNAMED)
    config = agent_config(options, planned, environ, detect(environ, options.nproc_per_node))
    check_open_files(config.slots)
    if config.spec.program.is_on_stdin:
        take_program_from_stdin()
    return options, planned, config


def _log_line(form: LogFormat, line: str, level: str = "info") -> None:
    # Not `sys.stderr`: it is None where the command was started with stderr closed.
    with suppress(OSError):
        os.write(2, OwnLines(form, has_terminal=os.isatty(2)).line(line, level))


def _outcome(options: Options, planned: Planned, config: AgentConfig, agent: AgentRun) -> Outcome:
    """Take part in the job until its outcome is known. Raises UsageError, SiteError and CannotRun."""
    from elaunch.launcher.store.connect import connect_store

    with ExitStack() as opened:
        try:
            # With --quiet only warnings are logged, and the line that other nodes need to join.
            log = agent.warn if options.quiet else agent.pump.log
            connected = opened.enter_context(connect_store(options, planned, log))
        except KeyboardInterrupt:
            agent.pump.log("interrupted while connecting to the job's store; no worker was started")
            raise
        settled = replace(
            config,
            worker_env={**connected.network, **config.worker_env},
            topology=topology_of(options, planned),
            master_addr=connected.address,
            invitation=connected.invitation,
            only_here=connected.only_here,
        )
        return agent.run(
            settled,
            connected.store,
            is_remote=connected.is_remote,
            served_pid=connected.served_pid,
            locator=connected.locator,
        )
