"""Every option, once: the parser, the job file's keys, `--help` and docs/options.md are derived from these fields."""

# ruff: noqa: RUF009  # What seems to be a default is a field.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import click

from elaunch import __version__
from elaunch.agent.config import LogFormat, NumaBinding, OnHang, StreamChoice
from elaunch.launcher.options import values
from elaunch.launcher.options.command_line import HELP, TEXT, Command, Group, Option, Source, show
from elaunch.launcher.options.hostlist import Host
from elaunch.launcher.options.values import Address
from elaunch.launcher.schedulers.detect import SCHEDULERS
from elaunch.rendezvous.types import ProgramKind


def _option(group: Group, metavar: str, help: str, convert: values.Convert | None = None, **more: Any) -> Any:
    """A field for the option of its name, with the arguments of `Option`. Its default is shown, but not a switch's."""
    default = more.get("default")
    value = getattr(default, "value", default)
    shown = "none" if value in (None, (), {}) else f"{value:g}" if isinstance(value, float) else str(value)
    more = {"group": group, "default_text": shown if metavar else "", **more}
    return field(metadata={"option": lambda name: Option(name, metavar, help, convert, **more)})


def _accepted(metavar: str, why: str, convert: values.Convert | None = None) -> Any:
    return _option(Group.ACCEPTED, metavar, why, convert, default_text="", peer=True, no_effect=why)


_size, _hosts, _restarts, _output, _workers, _rendezvous, _other, _ = (partial(_option, group) for group in Group)


def _version(ctx: click.Context, _: click.Parameter, is_given: bool) -> None:
    if is_given:
        show(ctx, f"elaunch {__version__}")


def _job_file(ctx: click.Context, _: click.Parameter, path: str | None) -> str | None:
    """Make the job file's options the defaults of those that no variable sets."""
    is_elsewhere = isinstance(ctx.command, Command) and ctx.command.is_elsewhere
    if path and not is_elsewhere and (found := ctx.obj.read_job_file(path)):
        ctx.obj.job_file = found
        ctx.default_map = {**found.options, **(ctx.default_map or {})}
    return path


@dataclass(frozen=True)
class Options:
    """A checked command line. The fields with an option have its name; `given` has those that were given.

    `run_id` None means a fresh one, `nproc_per_node` None one worker per GPU. `master_port` is the first and the
    last port of a range, None or 0 any free one.
    `log_dir` is as typed: relative to where the command was started. `typed` are the options of the command line as
    text, and `program` its other arguments; `exported` are the options that variables decide, as text.
    """

    kind: ProgramKind
    target: str
    args: tuple[str, ...]
    given: Mapping[str, Source]
    typed: Mapping[str, str]
    program: tuple[str, ...]
    exported: Mapping[str, str]
    # fmt: off
    nnodes: tuple[int, int] = _size(
        "MIN:MAX", "number of nodes, or a range", values.nodes, default=(1, 1), default_text="1", peer=True,
    )
    nproc_per_node: int | str | None = _size(
        "N", "workers: N, gpu, cpu, auto, xpu, npu, hpu", values.workers, default_text="the GPUs, else 1", peer=True,
    )

    hosts: tuple[Host, ...] = _hosts(
        "HOST,…", "start on these hosts; HOST:N has N workers", values.hosts, default=(), default_text="this host",
    )
    hostfile: str | None = _hosts("FILE", "file of hosts: HOST slots=N on each line")
    ssh_env: tuple[str, ...] = _hosts("NAMES", "more variables for the hosts, like AWS_*", values.names, default=())
    ssh_command: tuple[str, ...] | None = _hosts(
        "COMMAND", "instead of ssh, like \"ssh -p 2222\"", values.command, default_text="ssh",
    )
    dry_run: bool = _hosts("", "show the commands, and start nothing")

    max_restarts: int = _restarts(
        "N", "restarts of the job after failures; 0: none", values.whole, default=3, peer=True,
    )
    restart_window: float | None = _restarts(
        "SECONDS", "count only the restarts of the last SECONDS", values.duration, default_text="all",
    )
    no_restart_codes: tuple[int, ...] = _restarts(
        "CODES", "workers' exit codes that end the job, with that code", values.exit_codes, default=(),
    )
    exclude_after: int = _restarts(
        "N", "exclude a node after N similar failures in a row; 0: off", values.whole, default=3,
    )
    stop_grace: float = _restarts(
        "SECONDS", "time to save and end after a stop signal",
        values.seconds, default=30.0, peer="shutdown-timeout", environment=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",),
    )
    failure_grace: float = _restarts(
        "SECONDS", "time that other workers have after a failure", values.seconds, default=0.5,
    )
    children_grace: float = _restarts(
        "SECONDS", "after success, end children idle this long", values.seconds, default=60.0,
    )
    hang_timeout: float = _restarts(
        "SECONDS", "time without progress that is a hang; 0: never", values.seconds, default=60.0,
    )
    health_check: str = _restarts(
        "HOW", "check this node before it joins: off, warn, strict",
        values.OneOf("off", "warn", "strict"), default="warn",
    )
    health_command: tuple[str, ...] | None = _restarts(
        "COMMAND", "the site's check; if it fails the node does not join", values.command,
    )
    on_hang: OnHang = _restarts(
        "ACTION", "warn, restart or off", values.on_hang,
        default=OnHang.WARN, default_text="warn; restart with --hang-timeout",
    )
    signals_to_handle: tuple[str, ...] = _restarts(
        "NAMES", "signals that stop the job", values.signal_names,
        default=("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"),
        default_text="TERM, INT, HUP, QUIT, USR1, USR2", peer=True,
    )

    log_dir: Path | None = _output(
        "DIR", "keep workers' output in files in DIR", values.directory, default_text="none; -r, -t: new", peer=True,
    )
    log_max_size: int = _output(
        "SIZE", "limit of a log and its rotated file, like 100M", values.size, default=0, default_text="no limit",
    )
    redirects: StreamChoice = _output(
        "STREAMS", "to files: 0 none 1 out 2 err 3 both, or RANK:V,…",
        values.streams, default=StreamChoice(), default_text="0", short="r", peer=True,
    )
    tee: StreamChoice = _output(
        "STREAMS", "to files and console, as -r",
        values.streams, default=StreamChoice(), default_text="3 with --log-dir, else 0", short="t", peer=True,
    )
    log_line_prefix_template: str | None = _output(
        "TEXT", "of console lines, like '${hostname}:${rank} '",
        values.spaced_text, default_text="'[${rank}] '", environment=("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",),
    )
    local_ranks_filter: frozenset[int] | None = _output(
        "RANKS", "local ranks to show on the console, like 0,1", values.ranks, default_text="all", peer=True,
    )
    ranks_filter: frozenset[int] | None = _output(
        "RANKS", "global ranks to show on the console, like 0,8", values.ranks, default_text="all",
    )
    verbose: bool = _output("", "also what elaunch chose at the start, and all tracebacks", short="v")
    quiet: bool = _output("", "elaunch logs only warnings, errors and the report", short="q")
    log_format: LogFormat = _output(
        "FORM", "form of lines: text (files: with time), plain, json", values.log_format, default=LogFormat.TEXT,
    )
    duplicate_stdout_filters: tuple[str, ...] = _output(
        "TEXTS", "copy stdout lines with one of TEXTS to a file", values.phrases, default=(), peer=True,
    )
    duplicate_stderr_filters: tuple[str, ...] = _output(
        "TEXTS", "copy stderr lines with one of TEXTS to a file", values.phrases, default=(), peer=True,
    )

    module: bool = _workers("", "the program is a module, as python -m", short="m", peer=True)
    no_python: bool = _workers("", "the program is a command, not Python", peer=True)
    preload: tuple[str, ...] | None = _workers(
        "MODULES", "import these once per node, and nothing else", values.names, default_text="torch",
    )
    no_preload: bool = _workers("", "start each worker as a new interpreter")
    warm: float = _workers(
        "", f"keep the imports {values.WARM_MIN:g} minutes for the next start", values.minutes,
        default=0.0, default_text="off", environment=("ELAUNCH_WARM",),
    )
    numa_binding: NumaBinding | None = _workers(
        "MODE", "bind CPUs by: node, socket, exclusive, core-complex", values.numa_binding, peer=True,
    )
    virtual_local_rank: bool = _workers("", "each worker sees LOCAL_RANK 0 and one GPU", peer=True)
    role: str = _workers(
        "NAME[=N,…]", "the workers' ROLE_NAME; ps=1,trainer=3: several", values.role, default="default", peer=True,
    )

    run_id: str | None = _rendezvous(
        "ID", "the job's name", values.run_id, default_text='one node: new each time; several: "none"', peer="rdzv-id",
    )
    standalone: bool = _rendezvous("", "one node with a new id; --rdzv-* are ignored", peer=True)
    rdzv_endpoint: tuple[Address, ...] = _rendezvous(
        "HOST:PORT", "address of the rendezvous: a node's, or etcd's", values.endpoints, default=(), peer=True,
    )
    rdzv_backend: str = _rendezvous(
        "NAME", "backend: c10d, etcd, etcd-v2, static",
        values.OneOf("static", "c10d", "etcd", "etcd-v2"), default="static", default_text="what listens", peer=True,
    )
    rdzv_conf: Mapping[str, str] = _rendezvous(
        "K=V,K=V", "settings of the rendezvous", values.key_values, default={}, peer=True,
    )
    scheduler: str = _rendezvous(
        "NAME", "scheduler that fills in the rest: auto, none, a name",
        values.OneOf("auto", "none", *SCHEDULERS), default="auto",
    )
    topology: str = _rendezvous(
        "A.B.C", "place like rack3.switch7; orders ranks", values.host, default="", default_text="Slurm's or NVLink's",
    )
    token_file: str | None = _rendezvous(
        "FILE", "file with the job's secret", default_text="ELAUNCH_TOKEN, else a new one",
    )
    node_rank: int = _rendezvous("N", "static: this node's number", values.node_rank, default=0, peer=True)
    master_addr: str | None = _rendezvous(
        "HOST", "static: MASTER_ADDR", values.host, default_text="the first node's address", peer=True,
    )
    master_port: tuple[int, int] | None = _rendezvous(
        "PORT", "MASTER_PORT, or FIRST:LAST", values.ports, default_text="a free one per generation", peer=True,
    )
    local_addr: str | None = _rendezvous(
        "HOST", "this node's address", values.host, default_text="toward the endpoint, else 127.0.0.1", peer=True,
    )

    debug: int | None = _other("RANK", "this global rank waits for an IDE (debugpy)", values.whole)
    debug_on_error: str | None = _other("RANK", "pdb or IDE in that rank if it raises; any: the first", values.text)
    on_event: tuple[str, ...] | None = _other(
        "COMMAND", "run on failure, hang, restart, end; JSON on stdin", values.command,
    )
    metrics_port: tuple[str, int] | None = _other(
        "[HOST:]PORT", "serve this node's Prometheus metrics", values.listen_address,
    )
    config: str | None = _other(
        "FILE", "YAML file of options, script or module, args", is_eager=True, callback=_job_file,
    )

    run_path: bool = _option(Group.ACCEPTED, "", "scripts always run like this", peer=True)
    monitor_interval: float | None = _accepted("SECONDS", "exits are events, nothing is polled", values.seconds)
    start_method: str | None = _accepted(
        "NAME", "workers are forked from a preloaded process",values.OneOf("spawn", "fork", "forkserver"),
    )
    event_log_handler: str | None = _accepted("NAME", "there are no event handlers")
    logs_specs: str | None = _accepted("NAME", "there are no log plug-ins")
    # fmt: on


_VERSION = Option("version", "", "show the version", group=Group.OTHER, callback=_version, **TEXT)
_OF_FIELDS = (each.metadata["option"](each.name.replace("_", "-")) for each in fields(Options) if each.metadata)
TABLE: tuple[Option, ...] = (*_OF_FIELDS, HELP, _VERSION)
