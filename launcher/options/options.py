"""argv, the environment and the job file to Options: checked values, or one sentence about what is wrong.

Precedence: command line, then `PET_<NAME>` variables (torchrun's), then the job file, then the default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

from elaunch import __version__
from elaunch.agent.config import LogFormat, NumaBinding, OnHang, StreamChoice
from elaunch.launcher.errors import UsageError as UsageError
from elaunch.launcher.options import argv as command_line
from elaunch.launcher.options import job_file
from elaunch.launcher.options.endpoints import Address
from elaunch.launcher.options.job_file import JobFile
from elaunch.launcher.options.table import TABLE, OptionSpec
from elaunch.launcher.options.values import Raw
from elaunch.records import dataclass
from elaunch.rendezvous.job_spec import ProgramKind
from elaunch.rendezvous.rules.roles import counts_in


class Source(IntEnum):
    """Where an option's value was given; the larger wins."""

    FILE = 1
    ENVIRONMENT = 2
    COMMAND_LINE = 3


@dataclass(frozen=True)
class HelpRequested:
    """The command line asks for a text (--help, --version) instead of a job."""

    text: str


@dataclass(frozen=True)
class Options:
    """A checked command line. The fields are the options' names in the table; `given` says which were asked for.

    `run_id` None asks for a fresh one, `nproc_per_node` None for one worker per GPU. `master_port` None or 0 is a free
    port. `roles` are this node's workers by role, as text; empty for one role. `log_dir` is as typed: relative to where
    the command was started. `typed` is the command line, without `run`; `exported` are the options that variables
    decide, as text.
    """

    kind: ProgramKind
    target: str
    args: tuple[str, ...]
    given: Mapping[str, Source]
    typed: tuple[str, ...]
    exported: Mapping[str, str]
    nnodes: tuple[int, int]
    nproc_per_node: int | str | None
    max_restarts: int
    restart_window: float | None
    exclude_after: int
    stop_grace: float
    failure_grace: float
    children_grace: float
    hang_timeout: float
    health_check: str
    on_hang: OnHang
    hang_after: float
    signals_to_handle: tuple[str, ...]
    log_dir: Path | None
    redirects: StreamChoice
    tee: StreamChoice
    local_ranks_filter: frozenset[int] | None
    ranks_filter: frozenset[int] | None
    log_format: LogFormat
    verbose: bool
    quiet: bool
    show_all_tracebacks: bool
    duplicate_stdout_filters: tuple[str, ...]
    duplicate_stderr_filters: tuple[str, ...]
    module: bool
    no_python: bool
    preload: tuple[str, ...] | None
    preload_only: tuple[str, ...] | None
    no_preload: bool
    warm: float
    numa_binding: NumaBinding | None
    virtual_local_rank: bool
    role: str
    roles: str
    run_id: str | None
    standalone: bool
    rdzv_endpoint: tuple[Address, ...]
    rdzv_backend: str
    rdzv_conf: Mapping[str, str]
    store: str
    scheduler: str
    token_file: str | None
    node_rank: int
    master_addr: str | None
    master_port: int | None
    port_range: tuple[int, int] | None
    local_addr: str | None
    on_event: tuple[str, ...] | None
    metrics_port: int | None
    metrics_host: str
    config: str | None
    run_path: bool
    monitor_interval: float | None
    start_method: str | None
    event_log_handler: str | None
    logs_specs: str | None


@dataclass(frozen=True)
class _Given:
    """One value before its check, and how a message names it."""

    raw: Raw
    source: Source
    words: str


def parse(
    argv: Sequence[str], environ: Mapping[str, str], read_job_file: Callable[[str], JobFile] = job_file.read
) -> Options | HelpRequested:
    """Options of `argv` (without the program's name), or the text that it asks for.

    Raises UsageError. Reads nothing but its arguments and the file that --config names.
    """
    # `run` before a program is the sub-command, always. A script of that name starts as ./run.
    typed = tuple(argv[1:] if len(argv) > 1 and argv[0] == "run" else argv)
    words = command_line.normalise(typed)
    for spec, _ in words.options:
        if spec.name == "version":
            return HelpRequested(f"elaunch {__version__}")
        if spec.name == "help":
            from elaunch.launcher.options.help import help_text

            return HelpRequested(help_text())
    path = words.last("config") or environ.get("PET_CONFIG")
    job_file = read_job_file(path) if path else JobFile({})
    items, program = _collect(words, environ, job_file)
    fields: dict[str, Any] = {spec.dest: _value(spec, items.get(spec.dest)) for spec in _VALUED}
    lost = _settle(fields, items)
    kind, target, args = _program(fields, program, job_file, path)
    given = {dest: item.source for dest, item in items.items()}
    exported = {
        dest: item.raw
        for dest, item in items.items()
        if item.source is Source.ENVIRONMENT and isinstance(item.raw, str) and dest not in lost
    }
    options = Options(kind=kind, target=target, args=args, given=given, typed=typed, exported=exported, **fields)
    _check_size(options, items)
    return options


# Characters of an option and its value in a message.
_SHOWN_MAX = 200
_VALUED = tuple(spec for spec in TABLE if spec.name not in ("help", "version"))


def _collect(
    words: command_line.CommandLine, environ: Mapping[str, str], job_file: JobFile
) -> tuple[dict[str, _Given], tuple[str, ...]]:
    """Pick each option's value from the command line, the environment and the job file; and the program."""
    fallback: dict[str, _Given] = {}
    for dest, entry in job_file.options.items():
        fallback[dest] = _Given(entry.raw, Source.FILE, f"{entry.where}: {entry.key}: {_shown(entry.raw)}")
    for spec in _VALUED:
        variable = next((name for name in spec.variables if environ.get(name)), None)
        if variable:
            fallback[spec.dest] = _Given(environ[variable], Source.ENVIRONMENT, f"{variable}={environ[variable]}")
    typed = {spec.dest: (spec, value) for spec, value in words.options}
    own = {
        dest: _Given(value, Source.COMMAND_LINE, f"--{spec.name} {value}".rstrip())
        for dest, (spec, value) in typed.items()
    }
    return {**fallback, **own}, words.program


def _shown(raw: Raw) -> str:
    if isinstance(raw, list):
        return f"[{', '.join(raw)}]"
    return raw if isinstance(raw, str) else "{" + ", ".join(f"{key}: {value}" for key, value in raw.items()) + "}"


def _value(spec: OptionSpec, item: _Given | None) -> object:
    if item is None:
        return spec.default
    try:
        return spec.convert(item.raw)
    except ValueError as error:
        shown = item.words if len(item.words) <= _SHOWN_MAX else f"{item.words[:_SHOWN_MAX]}…"
        raise UsageError(f"{shown} {error}") from None


# Pairs of which only one can be meant.
_EXCLUSIVE = (
    ("verbose", "quiet", "drop one of them"),
    ("standalone", "nnodes", "a standalone job has one node; drop one of them"),
    ("module", "no_python", "a module always runs in Python; drop one of them"),
    ("preload", "no_preload", "drop one of them"),
    ("preload_only", "no_preload", "drop one of them"),
    ("preload", "preload_only", "name all modules in the one that is meant, and drop the other"),
    ("role", "roles", "all workers of this node have the one, or some have each of the others; drop one of them"),
    ("nproc_per_node", "roles", "the numbers of the roles make the number of workers; drop one of them"),
    ("master_port", "port_range", "the one port is then the only one; drop one of them"),
)


def _settle(fields: dict[str, Any], items: Mapping[str, _Given]) -> set[str]:
    """Of two options that exclude each other, keep the one from the stronger source. The same source is an error.

    Returns the options that were not kept. A standalone job gets a name of its own in any case, as in torchrun.
    """
    defaults = {spec.dest: spec.default for spec in TABLE}
    lost: set[str] = set()
    if fields["standalone"] and fields["nnodes"][0] == 1:
        # The range allows one node, and no other can come.
        fields["nnodes"] = (1, 1)
    if fields["nproc_per_node"] == _workers_of(fields["roles"]):
        fields["nproc_per_node"] = None
    for first, second, way_out in _EXCLUSIVE:
        if fields[first] == defaults[first] or fields[second] == defaults[second]:
            continue
        if items[first].source == items[second].source:
            raise UsageError(f"{_said(items[first])} contradicts {_said(items[second])}: {way_out}")
        loser = min(first, second, key=lambda dest: items[dest].source)
        fields[loser] = defaults[loser]
        lost.add(loser)
    if fields["standalone"]:
        fields["run_id"] = None
    if fields["roles"]:
        fields["nproc_per_node"] = _workers_of(fields["roles"])
    return lost


def _workers_of(roles: str) -> int:
    return sum(counts_in(roles).values())


def _said(item: _Given) -> str:
    return item.words.removesuffix(" 1") if item.words.startswith("--") else item.words


def _program(
    fields: Mapping[str, Any], program: tuple[str, ...], job_file: JobFile, path: str | None
) -> tuple[ProgramKind, str, tuple[str, ...]]:
    in_file = job_file.module or job_file.script
    if not program and in_file is None:
        what = "module" if fields["module"] else "command" if fields["no_python"] else "script"
        raise UsageError(f"no {what} to run; use elaunch [options] script.py args…, or see elaunch --help")
    if not program and fields["module"] and job_file.script:
        raise UsageError(f"-m asks for a module and {path} names a script ({in_file}); write module: in the file")
    if not program and fields["no_python"] and job_file.module:
        raise UsageError(f"--no-python asks for a command and {path} names a module ({in_file}); write script: there")
    target, *args = program or (str(in_file), *job_file.args)
    is_module = fields["module"] or (not program and job_file.module is not None)
    # In torchrun too --run-path comes before the others.
    if fields["run_path"]:
        return ProgramKind.SCRIPT, target, tuple(args)
    if fields["no_python"]:
        return ProgramKind.COMMAND, target, tuple(args)
    return (ProgramKind.MODULE if is_module else ProgramKind.SCRIPT), target, tuple(args)


def _check_size(options: Options, items: Mapping[str, _Given]) -> None:
    nodes = options.nnodes[1]
    # If nodes agree on ranks in the rendezvous, torchrun ignores --node-rank. With one node the rank is always checked.
    is_static = options.rdzv_backend == "static" or nodes == 1
    if not is_static or options.node_rank < nodes:
        return
    there = "a job of one node has node rank 0 only" if nodes == 1 else f"the nodes' ranks are 0 to {nodes - 1}"
    raise UsageError(f"{items['node_rank'].words} is out of range: {there}")
