"""Options and commands of elaunch for click, with torchrun's conventions that click lacks.

A long option may have `_` for `-`, and may be shortened while that is unambiguous. Its value may come from given
variables and a job file. An error is one sentence. Pure.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from elaunch.launcher.errors import UsageError
from elaunch.launcher.options import values

# The limit of characters of an option and its value in a message.
_SHOWN_MAX = 200
# Where click's context has the arguments of the command line.
_ARGV = "elaunch.argv"
_PLACES = {"FILE": "file", "PATH": "file", "DIR": "dir"}


class Group(Enum):
    """The headings of --help, in its order."""

    SIZE = "Job size"
    HOSTS = "Several hosts, by ssh"
    RESTARTS = "Restarts"
    OUTPUT = "Output"
    WORKERS = "Workers"
    RENDEZVOUS = "Rendezvous"
    OTHER = "Other"
    ACCEPTED = "Accepted from torchrun, without effect"


class Source(IntEnum):
    """Where an option's value was given; the larger wins."""

    FILE = 1
    ENVIRONMENT = 2
    COMMAND_LINE = 3


@dataclass(frozen=True)
class Given:
    """One value before its check, and its name in messages."""

    raw: values.Raw
    source: Source
    label: str


@dataclass
class ParseState:
    """click's `obj`: the inputs of parsing a command line, and the options that were given, in order."""

    environ: Mapping[str, str] = field(default_factory=dict)
    read_job_file: Callable[[str], Any] = lambda _: None
    job_file: Any = None
    given: dict[str, Given] = field(default_factory=dict)


class _Checked(click.ParamType):  # type: ignore[type-arg]  # Not generic before click 8.4.
    """Checks a value by a function of `values`."""

    name = "value"

    def __init__(self, convert: values.Convert) -> None:
        self._convert = convert

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        assert isinstance(param, Option)
        assert ctx
        if ctx.get_parameter_source(param.name) is ParameterSource.DEFAULT:
            return value
        given = value if isinstance(value, Given) else param.typed(value)
        ctx.obj.given[param.name] = given
        try:
            return self._convert(given.raw)
        except ValueError as error:
            shown = given.label if len(given.label) <= _SHOWN_MAX else f"{given.label[:_SHOWN_MAX]}…"
            raise UsageError(f"{shown} {error}") from None

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        if place := _PLACES.get(str(param.metavar)):
            return [CompletionItem(incomplete, type=place)]
        choices = getattr(self._convert, "choices", ())
        return [CompletionItem(choice) for choice in choices if choice.startswith(incomplete)]


class Option(click.Option):
    """One option. Those of a job have a `group`, and can come from variables and the job file.

    `metavar` is empty for a switch. `peer` is the option's name in torchrun, true where it is the same. `no_effect` is
    why the option changes nothing here, in short. `environment` are variables read after the `PET_` ones. `name` is
    click's: with underscores. Its help ends with `default_text`, in brackets.
    """

    def __init__(
        self,
        name: str,
        metavar: str,
        help: str,
        convert: values.Convert | None = None,
        *,
        group: Group | None = None,
        default: Any = None,
        default_text: str = "",
        short: str = "",
        peer: str | bool = False,
        no_effect: str = "",
        environment: tuple[str, ...] = (),
        **more: Any,
    ) -> None:
        self.long, self.short, self.group, self.no_effect = name, short, group, no_effect
        self.peer = name if peer is True else peer or None
        self.names = (name,) if self.peer in (None, name) else (name, str(self.peer))
        self.variables = tuple(f"PET_{each.replace('-', '_').upper()}" for each in self.names) + environment
        super().__init__(
            [name.replace("-", "_"), *(f"--{each}" for each in self.names), *([f"-{short}"] if short else [])],
            metavar=metavar or None,
            is_flag=True if not metavar else None,
            default=False if default is None and not metavar else default,
            type=_Checked(convert or (values.text if metavar else values.switch)),
            help=f"{help} [{default_text}]" if default_text else help,
            **more,
        )

    def get_default(self, ctx: click.Context, call: bool = True) -> Any:
        # Before click 8.2 a switch with a type of its own has none.
        return self.default

    @property
    def usage(self) -> str:
        """The option as --help shows it."""
        short = f"-{self.short}, " if self.short else ""
        return f"{short}--{self.long} {self.metavar or ''}".rstrip()

    def typed(self, value: Any) -> Given:
        """A value of the command line."""
        if self.is_flag:
            return Given("on", Source.COMMAND_LINE, f"--{self.long}")
        # click leaves the = of -r=3.
        value = value.removeprefix("=") if self.short else value
        shown = value if value.isprintable() else repr(value)
        return Given(value, Source.COMMAND_LINE, f"--{self.long} {shown}".rstrip())


def show(ctx: click.Context, text: str) -> None:
    # The text is longer than the buffer, so its reader may have exited (`| head`).
    with suppress(BrokenPipeError):
        click.echo(text)
    ctx.exit()


def _help(ctx: click.Context, _: click.Parameter, is_given: bool) -> None:
    if is_given:
        show(ctx, ctx.get_help())


# Settings of an option that prints something and exits before anything else is checked.
TEXT: dict[str, Any] = {"is_eager": True, "expose_value": False}
HELP = Option("help", "", "show this text", group=Group.OTHER, short="h", peer=True, callback=_help, **TEXT)

# Other launchers' options, and ours: torch.distributed.launch, mpirun, accelerate, deepspeed, Slurm.
_ELSEWHERE = {
    **dict.fromkeys(("--np", "--nprocs", "--num-proc", "--num-processes", "--gpus", "--num-gpus"), "--nproc-per-node"),
    **dict.fromkeys(("--nproc-per-machine", "--gpus-per-node", "--ntasks-per-node"), "--nproc-per-node"),
    **dict.fromkeys(("--num-nodes", "--num-machines"), "--nnodes"),
    "--machine-rank": "--node-rank",
    "--main-process-ip": "--master-addr",
    "--main-process-port": "--master-port",
}
# Not an abbreviation of --token-file: its value would be a secret, which every user of the host can read in /proc.
_SECRET = "--token"
# What is no option, and why, or which option is meant.
_NO_OPTIONS = {
    _SECRET: "would show the job's token to everybody; set ELAUNCH_TOKEN, or give --token-file FILE",
    "--use-env": "is not an option of elaunch, which always does that: leave it out, and read LOCAL_RANK from the"
    " environment, or give the script '--local-rank=${local_rank}'",
    "--print-completion": "is not an option of elaunch; a shell completes after"
    ' eval "$(_ELAUNCH_COMPLETE=bash_source elaunch)" (or zsh_source)',
    **{name: f"is not an option of elaunch; did you mean {meant}?" for name, meant in _ELSEWHERE.items()},
}
# Former names of options.
_FORMERLY = {"hang-after": "hang-timeout"}


def _dashed(word: str) -> str:
    name = word.replace("_", "-")
    return _FORMERLY.get(name, name)


class Command(click.Command):
    """A command whose `work` gets its context and returns the exit code, or, for a job, its options.

    `usage` are the lines after its name. Its --help shows its options without a group, between `about` and `ending`.
    With `is_elsewhere` the job runs on other hosts: this host's variables and job file do not apply.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[click.Context], Any],
        params: Sequence[click.Parameter],
        usage: Sequence[str],
        about: str,
        ending: str = "",
        is_elsewhere: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(
            name,
            params=[*params, *(() if HELP in params else (HELP,))],
            help=about,
            epilog=ending,
            add_help_option=False,
            context_settings={"token_normalize_func": _dashed, **settings},
        )
        self._work, self._usage, self.is_elsewhere = work, usage, is_elsewhere
        self.options = [param for param in self.params if isinstance(param, Option)]

    def invoke(self, ctx: click.Context) -> Any:
        return self._work(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_ARGV] = tuple(args)
        valued = (option for option in self.options if option.group and option.expose_value)
        of_job = () if self.is_elsewhere else valued
        ctx.default_map = {option.name: given for option in of_job if (given := _variable(option, ctx.obj.environ))}
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            name = _dashed(getattr(error, "option_name", ""))
            if name in _NO_OPTIONS:
                raise UsageError(f"{name} {_NO_OPTIONS[name]}") from None
            command = ctx.command_path.removesuffix(" run")
            raise UsageError(f"{error.format_message().rstrip('.')}; see {command} --help") from None

    def make_parser(self, ctx: click.Context) -> Any:
        """click's parser, which also accepts the abbreviations that were typed."""
        parser = super().make_parser(ctx)
        typed = {_dashed(word.partition("=")[0]) for word in ctx.meta[_ARGV] if word.startswith("--")}
        for word in typed - {"--", _SECRET}.union(*(option.opts for option in self.options)):
            if len(meant := self.meant(word)) == 1:
                short = copy.copy(meant[0])
                short.opts = [word]
                short.add_to_parser(parser, ctx)
        return parser

    def meant(self, word: str) -> list[Option]:
        """The options whose names begin with `word`.

        The command's own come first, then torchrun's, so that its abbreviations stay unambiguous beside elaunch's.
        """
        name = word.removeprefix("--")
        fitting = [option for option in self.options if any(each.startswith(name) for each in option.names)]
        own = [option for option in fitting if option.group is None]
        return own or [option for option in fitting if option.peer and option.peer.startswith(name)] or fitting

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        path = ctx.command_path.removesuffix(" run")
        usage = "\n       ".join(f"{path} {line}".rstrip() for line in self._usage)
        formatter.write(f"Usage: {usage}\n\n{self.help}\n")
        own = [option for option in self.options if option.group is None]
        width = max((len(option.usage) for option in own), default=0)
        lines = "".join(f"  {option.usage:{width}}  {option.help}\n" for option in own)
        formatter.write(f"\n{lines}" if lines else "")
        ending = [self.epilog] if self.epilog else []
        if ctx.parent and not ctx.parent.parent:
            ending.append(f"Start a script called {self.name} with elaunch ./{self.name}.")
        formatter.write("\n" + "\n".join([*ending, ""]) if ending else "")

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        # Arguments after the program are the program's own.
        if ctx.params.get("program"):
            return [CompletionItem(incomplete, type="file")]
        return super().shell_complete(ctx, incomplete)


def _variable(option: Option, environ: Mapping[str, str]) -> Given | None:
    """The option's value from the first of its variables that is set and not empty."""
    name = next((name for name in option.variables if environ.get(name)), None)
    return Given(environ[name], Source.ENVIRONMENT, f"{name}={environ[name]}") if name else None


# Each command: its module, and a short text about it.
COMMANDS = {
    "doctor": ("doctor.command:COMMAND", "check whether this node can train, with the options of a job"),
    "run": ("options.options:RUN", "start a job; may be left out"),
    "store": ("store.serve:COMMAND", "serve a store for jobs of several nodes"),
    "submit": ("options.command_line:SUBMIT", "submit a job to a scheduler"),
    "status": ("inspect.status:STATUS", "show how a running job is doing"),
    "top": ("inspect.top:TOP", "show a running job, refreshed each second"),
    "stacks": ("inspect.commands:STACKS", "show the stacks of all ranks of a running job"),
    "stop": ("inspect.commands:STOP", "end a running job on all nodes, as Ctrl-C does"),
    "restart": ("inspect.commands:RESTART", "start the workers of a running job again"),
    "warm": ("inspect.commands:WARM", "show or end the warm fork servers"),
    "rehearse": ("rehearse.command:COMMAND", "measure what failures cost a script, and whether they change its result"),
    "report": ("inspect.report:COMMAND", "make a page that shows what happened in a run"),
}
_SCHEDULERS = {
    "slurm": ("schedulers.submit_slurm:COMMAND", "write a batch script, and submit it with sbatch"),
    "k8s": ("schedulers.submit_kubernetes:COMMAND", "create a Job with kubectl"),
}


class _Commands(click.Group):
    """Commands that are imported by name."""

    def __init__(self, name: str, listed: Mapping[str, tuple[str, str]], text: str = "", **settings: Any) -> None:
        super().__init__(name, add_help_option=False, no_args_is_help=False, **settings)
        self.listed, self._text = listed, text

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(self._text)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.listed:
            return None
        module, _, name = self.listed[cmd_name][0].partition(":")
        found: click.Command = getattr(importlib.import_module(f"elaunch.launcher.{module}"), name)
        return found

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        return [
            CompletionItem(name, help=text) for name, (_, text) in self.listed.items() if name.startswith(incomplete)
        ]


class _Elaunch(_Commands):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args and args[0] in self.listed else ["run", *args])


_SUBMIT = """\
Usage: elaunch submit slurm [options] [elaunch options] train.py args…
       elaunch submit k8s [options] [elaunch options] train.py args…

Write the job for a cluster's scheduler and submit it; with --dry-run, only show it.
elaunch submit slurm --help and elaunch submit k8s --help list the options.
Start a script called submit with elaunch ./submit.
"""
SUBMIT = _Commands("submit", _SCHEDULERS, _SUBMIT, params=[HELP])
ELAUNCH = _Elaunch("elaunch", COMMANDS)
