"""argv, the environment and the job file to Options: checked values, or one sentence about what is wrong.

Precedence: command line, then `PET_<NAME>` variables (torchrun's), then the job file, then the default. The job file is
a YAML mapping of options, with the program as `script` or `module` and `args`. Its scalars stay text: YAML 1.1 would
read `1:4` as 64 and `no` as False. The option's converter checks them, as it checks a word of the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from elaunch.agent.config import OnHang
from elaunch.launcher.errors import UsageError as UsageError
from elaunch.launcher.errors import nearest
from elaunch.launcher.options.command_line import Command, Given, Group, Option, ParseState
from elaunch.launcher.options.command_line import Source as Source
from elaunch.launcher.options.rdzv_conf import SETTINGS, parse_rdzv_conf
from elaunch.launcher.options.table import TABLE
from elaunch.launcher.options.table import Options as Options
from elaunch.rendezvous.rules.assign_ranks import counts_in
from elaunch.rendezvous.types import ProgramKind

_OPTIONS = {option.name: option for option in TABLE}
_VALUED = tuple(name for name, option in _OPTIONS.items() if option.expose_value)
_PROGRAM_KEYS = ("script", "module", "args")
_NOT_IN_A_FILE = ("config", "help", "version", "module")
_FILE_OPTIONS = {name: option for option in TABLE if option.long not in _NOT_IN_A_FILE for name in option.names}
# A key with one of these has no value.
_NULLS = ("", "~", "null", "Null", "NULL")


@dataclass(frozen=True)
class JobFile:
    """The content of a job file: options by click's names, and the program if the file names one."""

    options: Mapping[str, Given]
    script: str | None = None
    module: str | None = None
    args: tuple[str, ...] = ()


def load_job_file(path: str) -> JobFile:
    """The job file at `path`. Raises UsageError if it cannot be read or understood."""
    try:
        # It may be a pipe, as in `--config <(make-it)`.
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"--config {path} cannot be read ({why}); give a YAML file of options") from None
    return parse_job_file(text, path)


def parse_job_file(text: str, name: str) -> JobFile:
    """The job file in `text`. Messages call it `name`. Raises UsageError."""
    entries = _entries(text, name)
    script, module, args = (entries.pop(key, None) for key in _PROGRAM_KEYS)
    if script and module:
        raise UsageError(f"{name} names a script ({script}) and a module ({module}); keep one of them")
    for key, value in (("script", script), ("module", module)):
        if not isinstance(value, str | None) or value in ("true", "false"):
            raise UsageError(f"{name}: {key} is {value}; give one name")
    if args is not None and not isinstance(args, list):
        raise UsageError(f"{name}: args is {args!r}; give a list, as in [--lr, 0.1]")
    given: dict[str, Given] = {}
    for key, raw in entries.items():
        option = _FILE_OPTIONS.get(key)
        if option is None:
            near = nearest(key, (*_FILE_OPTIONS, *_PROGRAM_KEYS))
            hint = f"did you mean {near}?" if near else "elaunch --help lists the options"
            raise UsageError(f"{name}: {key} is not an option of elaunch; {hint}")
        if option.name in given:
            raise UsageError(f"{name}: {key} is given twice; keep one")
        given[option.name] = Given(raw, Source.FILE, f"{name}: {key}: {raw}")
    return JobFile(given, script, module, tuple(args or ()))


def _entries(text: str, name: str) -> dict[str, Any]:
    """The file's top level. Keys are spelt with dashes. Keys without a value are left out."""
    import yaml  # Only if there is a job file: the import takes as long as all other imports of the launcher.

    try:
        root = yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise UsageError(f"{name} is not YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(root, dict | None) and root != "":
        raise UsageError(f"{name} is not a mapping of options; write one `name: value` per line")
    entries: dict[str, Any] = {}
    for key, value in (root or {}).items():
        items = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
        if not all(isinstance(item, str) for item in items):
            raise UsageError(f"{name}: {key} holds a list or mapping inside another; write plain text there")
        if key.replace("_", "-") in entries:
            raise UsageError(f"{name}: {key} is given twice; keep one")
        if value not in _NULLS:
            entries[key.replace("_", "-")] = value
    return entries


class JobCommand(Command):
    """A command that takes the options of a job, and its program, after which all arguments are the program's."""

    def __init__(self, name: str, work: Callable[[click.Context], Any], own: Sequence[Option], **texts: Any) -> None:
        program = click.Argument(["program"], nargs=-1, type=click.UNPROCESSED, shell_complete=_complete_program)
        taken = {option.name for option in own}
        options = [*own, *(option for option in TABLE if option.name not in taken), program]
        super().__init__(name, work, options, allow_interspersed_args=False, **texts)


def _complete_program(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Files; also the commands, if no file begins with `incomplete`."""
    found = [CompletionItem(incomplete, type="file")]
    if not ctx.meta["elaunch.argv"] and ctx.command is RUN and ctx.parent and not any(Path().glob(f"{incomplete}*")):
        found += ctx.parent.command.shell_complete(ctx.parent, incomplete)
    return found


_COLUMN = 37
_HEAD = """\
Usage: elaunch [options] script.py args…
       elaunch [options] -m module args…
       elaunch [options] --no-python command args…
       elaunch store [--listen HOST:PORT] [--token-file FILE]
       elaunch submit slurm|k8s [--dry-run] … script.py args…
       elaunch doctor [--json] [options]
       elaunch status|top|stacks [JOB]
       elaunch stop|restart JOB
       elaunch warm [--stop]
       elaunch rehearse [--steps N] [--link PATH] [options] script.py args…
       elaunch report [-o FILE] [--json] DIR

Start a PyTorch training job, one worker per GPU, and restart it when a worker fails.

Examples:
  elaunch train.py --lr 0.1                           one worker per GPU, up to 3 restarts
  elaunch --nproc-per-node 4 --log-dir logs train.py  4 workers, output on the console and in logs
  elaunch --config job.yaml --max-restarts 0          options from a file; any failure ends the job
  elaunch --hosts node0,node1:4 train.py              both hosts over ssh, 4 workers on node1
  elaunch --nnodes 2 --rdzv-endpoint node0:2379 train.py  on node0; it prints node1's line
"""

_FOOT = """\
An option can be written with _ for -, shortened while it stays unambiguous, given as a variable
(PET_MAX_RESTARTS=1) or in a job file; the command line wins over variables, these over the file.
A script called - is read from stdin. Options of Python, as in `python -X dev -m elaunch`, are kept.
Exit codes: 0 all workers succeeded, 1 the job failed, 2 the command line is wrong, 3 the store or
an address was unavailable, or this node does not know how the job ended, 128 + N ended by signal N.
"""


def help_text() -> str:
    """Groups in order, one line for each option, then the settings that have an effect."""
    parts = [_HEAD]
    for group in Group:
        lines = [f"  {each.usage:<{_COLUMN}} {each.help}" for each in TABLE if each.group is group]
        parts.append("\n".join([f"{group.value}:", *lines, ""]))
    settings = [f"  {', '.join(each.names):<{_COLUMN}} {each.help}" for each in SETTINGS if not each.no_effect]
    parts.append("\n".join(["Settings of --rdzv-conf, for several nodes:", *settings, ""]))
    return "\n".join([*parts, _FOOT]).rstrip("\n")


class _Run(JobCommand):
    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(help_text())


def parse(
    argv: Sequence[str], environ: Mapping[str, str], read_job_file: Callable[[str], JobFile] = load_job_file
) -> Options:
    """The options and the program in `argv`. Raises UsageError, and click's Exit after a text.

    Reads nothing but its arguments and the file that --config names.
    """
    return options_of(RUN.make_context("elaunch run", list(argv), obj=ParseState(environ, read_job_file)))


def options_of(ctx: click.Context, program: tuple[str, ...] = ()) -> Options:
    """The options in the context of a JobCommand, with `program` if the user has named none. Raises UsageError."""
    items = {name: given for name, given in ctx.obj.given.items() if name in _OPTIONS}
    fields: dict[str, Any] = {name: ctx.params[name] for name in _VALUED}
    lost = _settle(fields, items)
    if fields["debug"] is not None or fields["debug_on_error"] is not None:
        # A restart, or a verdict on a hang, would end the session.
        fields.update(max_restarts=0, hang_timeout=0.0, on_hang=OnHang.OFF)
    _settle_hangs(fields, items)
    typed = ctx.params["program"]
    kind, target, args = _program(fields, typed or program, ctx.obj.job_file or JobFile({}))
    by_source = {source: {name: each.raw for name, each in items.items() if each.source is source} for source in Source}
    # If nodes agree on ranks in the rendezvous, torchrun ignores --node-rank. With one node the rank is always checked.
    nodes = fields["nnodes"][1]
    if (fields["rdzv_backend"] == "static" or nodes == 1) and fields["node_rank"] >= nodes:
        raise UsageError(f"{items['node_rank'].label} is out of range: the nodes' ranks are 0 to {nodes - 1}")
    return Options(
        kind=kind,
        target=target,
        args=args,
        given={name: each.source for name, each in items.items()},
        typed=by_source[Source.COMMAND_LINE],
        program=typed,
        exported={name: raw for name, raw in by_source[Source.ENVIRONMENT].items() if name not in lost},
        **fields,
    )


# Its `work` returns the options: `launcher.cli` runs the job.
RUN = _Run("run", options_of, (), usage=(), about="")


def submitted(
    ctx: click.Context, environ: Mapping[str, str], read_job_file: Callable[[str], JobFile] = load_job_file
) -> Options:
    """The job in the context of a command that submits it. Raises UsageError, also if its nodes would refuse it."""
    typed = {name: given.raw for name, given in ctx.obj.given.items() if name in _OPTIONS and name != "dry_run"}
    options = parse(argv_of(typed, ctx.params["program"]), environ, read_job_file)
    parse_rdzv_conf(options.rdzv_conf)
    if options.hosts or options.hostfile:
        raise UsageError("--hosts starts by ssh what submit leaves to the scheduler; drop one of them")
    if options.kind is ProgramKind.SCRIPT and options.target == "-":
        raise UsageError("- means a program on stdin, and a submitted job has no stdin; name a file on its nodes")
    return options


def argv_of(typed: Mapping[str, str], program: Sequence[str]) -> list[str]:
    """The command line of a job that has these options and this program."""
    argv: list[str] = []
    for name, value in typed.items():
        option = _OPTIONS[name]
        joined = f"--{option.long}" if option.is_flag else f"--{option.long}={value}"
        argv += [joined] if option.is_flag or value.startswith("-") else [f"--{option.long}", value]
    # A program whose name begins with a dash must come after `--`.
    end = ["--"] if program and program[0].startswith("-") and program[0] != "-" else []
    return [*argv, *end, *program]


# Pairs of mutually exclusive options.
_EXCLUSIVE = (
    ("verbose", "quiet", "drop one of them"),
    ("standalone", "nnodes", "a standalone job has one node; drop one of them"),
    ("module", "no_python", "a module always runs in Python; drop one of them"),
    ("preload", "no_preload", "drop one of them"),
    ("hosts", "hostfile", "drop one of them"),
    ("debug", "debug_on_error", "an attached IDE stops at exceptions by itself; drop one of them"),
)


def _settle_hangs(fields: dict[str, Any], items: Mapping[str, Given]) -> None:
    """A given limit means that a hang restarts the job, unless the user gives the action; 0 is no limit."""
    if not fields["hang_timeout"] or fields["on_hang"] is OnHang.OFF:
        fields["hang_timeout"], fields["on_hang"] = 0.0, OnHang.OFF
    elif "hang_timeout" in items and "on_hang" not in items:
        fields["on_hang"] = OnHang.RESTART


def _settle(fields: dict[str, Any], items: Mapping[str, Given]) -> set[str]:
    """Of two options that exclude each other, keep the one from the stronger source. The same source is an error.

    Returns the options that were dropped. A standalone job gets a name of its own in any case, as in torchrun.
    """
    defaults = {name: option.default for name, option in _OPTIONS.items()}
    lost: set[str] = set()
    if fields["standalone"] and fields["nnodes"][0] == 1:
        # The range allows one node, and no other can join.
        fields["nnodes"] = (1, 1)
    for first, second, way_out in _EXCLUSIVE:
        if fields[first] == defaults[first] or fields[second] == defaults[second]:
            continue
        if items[first].source == items[second].source:
            raise UsageError(f"{items[first].label} contradicts {items[second].label}: {way_out}")
        loser = min(first, second, key=lambda dest: items[dest].source)
        fields[loser] = defaults[loser]
        lost.add(loser)
    if fields["standalone"]:
        fields["run_id"] = None
    if workers := sum(counts_in(fields["role"]).values()):
        given = items.get("nproc_per_node")
        if given and given.source >= items["role"].source and fields["nproc_per_node"] != workers:
            raise UsageError(f"{given.label} contradicts {items['role'].label}, which is {workers} workers; drop one")
        fields["nproc_per_node"] = workers
    return lost


def _program(
    fields: Mapping[str, Any], program: tuple[str, ...], job_file: JobFile
) -> tuple[ProgramKind, str, tuple[str, ...]]:
    in_file = job_file.module or job_file.script
    if not program and in_file is None:
        raise UsageError("no program to run; use elaunch [options] script.py args…, or see elaunch --help")
    if not program and ((fields["module"] and job_file.script) or (fields["no_python"] and job_file.module)):
        raise UsageError(f"-m or --no-python contradicts {fields['config']}, whose program is {in_file}; drop it")
    target, *args = program or (str(in_file), *job_file.args)
    is_module = fields["module"] or (not program and job_file.module is not None)
    kind = ProgramKind.COMMAND if fields["no_python"] else ProgramKind.MODULE if is_module else ProgramKind.SCRIPT
    # As in torchrun, --run-path takes precedence.
    return (ProgramKind.SCRIPT if fields["run_path"] else kind), target, tuple(args)
