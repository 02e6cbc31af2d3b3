"""Every option, once: the parser, the job file's keys, `--help` and docs/options.md are derived from this table."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import click

from elaunch import __version__
from elaunch.agent.config import LogFormat, OnHang, StreamChoice
from elaunch.launcher.options import values
from elaunch.launcher.options.command_line import Command, Group, Option
from elaunch.launcher.schedulers.detect import SCHEDULERS
from elaunch.rendezvous.codec import HOST_BYTES_MAX, ROLE_BYTES_MAX, RUN_ID_BYTES_MAX


def _switch(name: str, group: Group, help: str, **more: Any) -> Option:
    return Option(name, group, "", help, **more)


def _accepted(name: str, metavar: str, why: str, convert: values.Convert | None = None) -> Option:
    return Option(name, Group.ACCEPTED, metavar, why, convert, peer=name, differs="has an effect", no_effect=why)


def _help(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        _show(ctx, ctx.get_help())


def _version(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        _show(ctx, f"elaunch {__version__}")


def _show(ctx: click.Context, text: str) -> None:
    # Longer than the buffer, so its reader may be gone already (`| head`).
    with suppress(BrokenPipeError):
        click.echo(text)
    ctx.exit()


def _job_file(ctx: click.Context, _: click.Parameter, path: str | None) -> str | None:
    """Make the job file's options the defaults of those that no variable sets."""
    is_elsewhere = isinstance(ctx.command, Command) and ctx.command.is_elsewhere
    if path and not is_elsewhere and (found := ctx.obj.read_job_file(path)):
        ctx.obj.job_file = found
        ctx.default_map = {**found.options, **(ctx.default_map or {})}
    return path


_SIZE = (
    Option(
        "nnodes", Group.SIZE, "MIN:MAX", "number of nodes, or a range", values.nodes,
        default=(1, 1), default_text="1", peer="nnodes",
    ),
    Option(
        "nproc-per-node", Group.SIZE, "N", "workers per node: N, gpu, cpu, auto", values.workers,
        default_text="one per GPU, else 1", peer="nproc-per-node", differs="default 1; also counts xpu",
    ),
)  # fmt: skip

_RESTARTS = (
    Option(
        "max-restarts", Group.RESTARTS, "N", "restarts of the job after failures; 0: none", values.whole,
        default=3, default_text="3", peer="max-restarts", differs="default 0; each agent has its own budget",
    ),
    Option(
        "restart-window", Group.RESTARTS, "SECONDS", "count only the restarts of the last SECONDS",
        values.positive_seconds, default_text="all",
    ),
    Option(
        "exclude-after", Group.RESTARTS, "N", "exclude a node after N like failures in a row; 0: never", values.whole,
        default=3, default_text="3",
    ),
    Option(
        "stop-grace", Group.RESTARTS, "SECONDS", "time to save and end after a stop signal",
        values.seconds, default=30.0, default_text="30", peer="shutdown-timeout",
        differs="whole seconds; not kept on restarts",
        environment=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",),
    ),
    Option(
        "failure-grace", Group.RESTARTS, "SECONDS", "time that other workers have after a failure",
        values.seconds, default=0.5, default_text="0.5",
    ),
    Option(
        "children-grace", Group.RESTARTS, "SECONDS", "after success, end children that are idle so long",
        values.seconds, default=60.0, default_text="60",
    ),
    Option(
        "hang-timeout", Group.RESTARTS, "SECONDS", "time without progress that is a hang; 0: never",
        values.seconds, default=60.0, default_text="60",
    ),
    Option(
        "health-check", Group.RESTARTS, "HOW", "look at this node before it joins: off, warn, strict",
        values.OneOf("off", "warn", "strict"), default="warn",
        default_text="warn",
    ),
    Option(
        "on-hang", Group.RESTARTS, "ACTION", "at a hang: warn, restart, off", values.on_hang,
        default=OnHang.WARN, default_text="warn; with a limit restart",
    ),
    Option(
        "signals-to-handle", Group.RESTARTS, "NAMES", "signals that stop the job", values.signal_names,
        default=("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"),
        default_text="TERM, INT, HUP, QUIT, USR1, USR2",
        peer="signals-to-handle", differs="ends at USR1 and USR2 without ending the workers; ignores unknown names",
    ),
)  # fmt: skip

_OUTPUT = (
    Option(
        "log-dir", Group.OUTPUT, "DIR", "keep the workers' output in files in DIR", values.directory,
        default_text="new with -r, -t", peer="log-dir",
        differs="default always a new one; its folders have no date; writes files only with -r or -t",
    ),
    Option(
        "redirects", Group.OUTPUT, "STREAMS", "to files: 0 none 1 out 2 err 3 both, or RANK:V,…",
        values.streams, default=StreamChoice(), default_text="0", short="r", peer="redirects",
        differs="ranks up to 9 only",
    ),
    Option(
        "tee", Group.OUTPUT, "STREAMS", "to files and console, as -r",
        values.streams, default=StreamChoice(), default_text="3 with --log-dir, else 0", short="t", peer="tee",
        differs="default 0; ranks up to 9 only",
    ),
    Option(
        "local-ranks-filter", Group.OUTPUT, "RANKS", "local ranks to show on the console, as 0,1", values.ranks,
        default_text="all", peer="local-ranks-filter",
    ),
    Option(
        "ranks-filter", Group.OUTPUT, "RANKS", "global ranks to show on the console, as 0,8", values.ranks,
        default_text="all",
    ),
    _switch("verbose", Group.OUTPUT, "also what elaunch chose at the start, and all tracebacks", short="v"),
    _switch("quiet", Group.OUTPUT, "of elaunch's own lines only warnings, errors and the report", short="q"),
    Option(
        "log-format", Group.OUTPUT, "FORM", "form of lines: text (files: with time), plain, json", values.log_format,
        default=LogFormat.TEXT, default_text="text",
    ),
    Option(
        "duplicate-stdout-filters", Group.OUTPUT, "WORDS", "copy stdout lines with one of WORDS to a file",
        values.phrases, default=(), default_text="none", peer="duplicate-stdout-filters",
    ),
    Option(
        "duplicate-stderr-filters", Group.OUTPUT, "WORDS", "copy stderr lines with one of WORDS to a file",
        values.phrases, default=(), default_text="none", peer="duplicate-stderr-filters",
    ),
)  # fmt: skip

_WORKERS = (
    _switch("module", Group.WORKERS, "the program is a module, as python -m", short="m", peer="module"),
    _switch("no-python", Group.WORKERS, "the program is a command, not Python", peer="no-python"),
    Option(
        "preload", Group.WORKERS, "MODULES", "import these once per node, and nothing else", values.names,
        default_text="torch",
    ),
    _switch("no-preload", Group.WORKERS, "start each worker as a new interpreter"),
    Option(
        "warm", Group.WORKERS, "", "keep the imports for the next start", values.minutes, default=0.0,
        default_text=f"0; typed: {values.WARM_MIN:g} minutes", environment=("ELAUNCH_WARM",),
    ),
    Option(
        "numa-binding", Group.WORKERS, "MODE", "bind CPUs by: node, socket, exclusive, core-complex",
        values.numa_binding, default_text="none", peer="numa-binding",
        differs="needs numactl",
    ),
    _switch(
        "virtual-local-rank", Group.WORKERS, "each worker sees LOCAL_RANK 0 and one GPU", peer="virtual-local-rank"
    ),
    Option(
        "role", Group.WORKERS, "NAME[=N,…]", "the workers' ROLE_NAME; ps=1,trainer=3: several",
        values.role(ROLE_BYTES_MAX), default="default", default_text="default", peer="role",
        differs="takes ps=1 as a name",
    ),
)  # fmt: skip

_RENDEZVOUS = (
    Option(
        "run-id", Group.RENDEZVOUS, "ID", "the job's name", values.name(RUN_ID_BYTES_MAX),
        default_text="a new one; for several nodes: none", peer="rdzv-id",
        differs="default none, the same for all jobs",
    ),
    _switch(
        "standalone", Group.RENDEZVOUS, "one node with a new id; --rdzv-* are ignored", peer="standalone",
        differs="with --nnodes 2 it waits for another node, which cannot come",
    ),
    Option(
        "rdzv-endpoint", Group.RENDEZVOUS, "HOST:PORT", "where the nodes meet: one of them, or an etcd",
        values.endpoints, default=(), default_text="none", peer="rdzv-endpoint",
        differs="one only; with static it is MASTER_ADDR:MASTER_PORT, here too, and the store is one port on",
    ),
    Option(
        "rdzv-backend", Group.RENDEZVOUS, "NAME", "kind of meeting: c10d, etcd, etcd-v2, static",
        values.OneOf("static", "c10d", "etcd", "etcd-v2"),
        default="static", default_text="what listens", peer="rdzv-backend",
        differs="default static; its c10d is no etcd, its etcd speaks v2 only",
    ),
    Option(
        "rdzv-conf", Group.RENDEZVOUS, "K=V,K=V", "settings of the rendezvous", values.key_values,
        default={}, default_text="none", peer="rdzv-conf", differs="other keys; unknown ones are ignored",
    ),
    Option(
        "scheduler", Group.RENDEZVOUS, "NAME", "scheduler that fills in the rest: auto, none, a name",
        values.OneOf("auto", "none", *SCHEDULERS), default="auto", default_text="auto",
    ),
    Option(
        "token-file", Group.RENDEZVOUS, "FILE", "file with the job's secret",
        default_text="ELAUNCH_TOKEN, else a new one",
    ),
    Option(
        "node-rank", Group.RENDEZVOUS, "N", "static: this node's number", values.node_rank,
        default=0, default_text="0", peer="node-rank",
    ),
    Option(
        "master-addr", Group.RENDEZVOUS, "HOST", "static: MASTER_ADDR", values.name(HOST_BYTES_MAX),
        default_text="the first node's address",
        peer="master-addr", differs="default 127.0.0.1",
    ),
    Option(
        "master-port", Group.RENDEZVOUS, "PORT", "MASTER_PORT, or FIRST:LAST", values.ports,
        default_text="a free one per generation", peer="master-port", differs="static only; default 29500",
    ),
    Option(
        "local-addr", Group.RENDEZVOUS, "HOST", "this node's address",
        values.name(HOST_BYTES_MAX), default_text="toward the endpoint, else 127.0.0.1",
        peer="local-addr", differs="default the host's full name",
    ),
)  # fmt: skip

# A text is shown before anything else is checked.
_TEXT: dict[str, Any] = {"is_eager": True, "expose_value": False}
HELP = _switch("help", Group.OTHER, "show this text", short="h", peer="help", callback=_help, **_TEXT)
_OTHER = (
    Option(
        "on-event", Group.OTHER, "COMMAND", "run at failure, hang, restart, end; JSON on stdin", values.command,
        default_text="none",
    ),
    Option(
        "metrics-port", Group.OTHER, "[HOST:]PORT", "serve this node's Prometheus metrics", values.listen_address,
        default_text="none",
    ),
    Option(
        "config", Group.OTHER, "FILE", "YAML file of options, script or module, args",
        default_text="none", is_eager=True, callback=_job_file,
    ),
    HELP,
    _switch("version", Group.OTHER, "show the version", callback=_version, **_TEXT),
)  # fmt: skip

_ACCEPTED = (
    _switch("run-path", Group.ACCEPTED, "scripts always run like this",
            peer="run-path", differs="runs the script by runpy, in a child of the agent"),
    _accepted("monitor-interval", "SECONDS", "exits are events, nothing is polled", values.seconds),
    _accepted("start-method", "NAME", "workers are forked from a preloaded process",
              values.OneOf("spawn", "fork", "forkserver")),
    _accepted("event-log-handler", "NAME", "there are no event handlers"),
    _accepted("logs-specs", "NAME", "there are no log plug-ins"),
)  # fmt: skip

TABLE: tuple[Option, ...] = (*_SIZE, *_RESTARTS, *_OUTPUT, *_WORKERS, *_RENDEZVOUS, *_OTHER, *_ACCEPTED)
