"""The text of `elaunch --help`, docs/options.md and the manual page docs/elaunch.1, made from the table of options."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stdout, suppress

import click

from elaunch.launcher.options.command_line import COMMANDS, ELAUNCH, Group, Option, ParseState
from elaunch.launcher.options.rdzv_conf import SETTINGS, Setting
from elaunch.launcher.options.table import TABLE

WIDTH = 100
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
  elaunch --nnodes 2 --rdzv-endpoint node0:2379 train.py  on node0; it prints the line for the other
"""

_FOOT = """\
An option can be written with _ for -, shortened while it stays unambiguous, given as a variable
(PET_MAX_RESTARTS=1) or in a job file; the command line wins over variables, these over the file.
A script called - is read from stdin. Options of Python, as in `python -X dev -m elaunch`, are kept.
Exit codes: 0 all workers succeeded, 1 the job failed, 2 the command line is wrong, 3 the store or
an address was unavailable, or this node does not know how the job ended, 128 + N ended by signal N.
"""

_PAGE_HEAD = """\
# Options

Every option, its default in brackets, and what torchrun does differently. A terminal shows the same list:

```sh
elaunch --help
```

A long option can be written with `_` for `-`, and shortened while it stays unambiguous. Each has a variable, `PET_` and
its name (`PET_MAX_RESTARTS`), and its own name in the job file of `--config`. The command line wins over variables,
variables over the file, and the file over the default. In the last column – means that torchrun does not have it,
and an empty cell that it does the same.

A script called `-` is read once from stdin, for every worker of every generation. Workers inherit the interpreter's
options `-W`, `-X`, `-O`, `-B` and `-b` (`python -X dev -m elaunch …`).

Commands: [`elaunch store`](operations.md#the-heads-own-store), `submit` ([Slurm](slurm.md),
[Kubernetes](kubernetes.md)), [`status`, `top`, `stacks`, `stop`, `restart`](observe.md#status-of-a-running-job),
[`report`](observe.md#the-report), [`doctor`](operations.md#before-a-run-elaunch-doctor),
[`warm`](warm.md), [`rehearse`](keeper.md#a-rehearsal). Start a script with one of these names by its path:
`elaunch ./store`. [A shell completes](shell.md) all of them.

`python -m elaunch.launcher.options.help > docs/options.md` makes this page from `launcher/options/table.py`."""
_SETTINGS_HEAD = """\
## Settings of the rendezvous

Keys of `--rdzv-conf`, for jobs of several nodes. Other keys are refused."""
_COLUMNS = ("| option | meaning | torchrun |", "|---|---|---|")


def help_text() -> str:
    """Groups in order, one line for each option, then the settings that have an effect."""
    parts = [_HEAD]
    for group in Group:
        lines = [_line(option) for option in TABLE if option.group is group]
        parts.append("\n".join([f"{group.value}:", *lines, ""]))
    settings = [f"  {', '.join(each.names):<{_COLUMN}} {each.help}" for each in SETTINGS if not each.no_effect]
    parts.append("\n".join(["Settings of --rdzv-conf, for several nodes:", *settings, ""]))
    return "\n".join([*parts, _FOOT]).rstrip("\n")


def _line(option: Option) -> str:
    default = f" [{option.default_text}]" if option.default_text else ""
    return f"  {option.usage:<{_COLUMN}} {option.help}{default}"


def markdown() -> str:
    """The page docs/options.md."""
    rows = [_PAGE_HEAD]
    for group in Group:
        rows += [
            "",
            f"## {group.value}",
            "",
            *_COLUMNS,
        ]
        rows += [_row(option) for option in TABLE if option.group is group]
    rows += ["", _SETTINGS_HEAD, "", "| key | meaning | torchrun |", "|---|---|---|"]
    rows += [_setting_row(setting) for setting in SETTINGS]
    return "\n".join(rows) + "\n"


def _setting_row(setting: Setting) -> str:
    names = ", ".join(f"`{name}`" for name in setting.names)
    meaning = f"no effect: {setting.no_effect}" if setting.no_effect else setting.help
    return f"| {names} | {meaning} | {setting.differs} |"


def _row(option: Option) -> str:
    names = [f"`-{option.short}`"] if option.short else []
    names += [f"`--{name} {option.metavar or ''}".rstrip() + "`" for name in option.names]
    peer = "–" if option.peer is None else option.differs
    default = f" [{option.default_text}]" if option.default_text else ""
    own = f"PET_{option.long.upper().replace('-', '_')}"
    others = [f"`{name}`" for name in option.variables if name != own and option.long not in ("help", "version")]
    variables = f"; also {', '.join(others)}" if others else ""
    return f"| {', '.join(names)} | {option.help}{default}{variables} | {peer} |"


_MAN_HEAD = """\
.\\" Made from the texts of --help: python -m elaunch.launcher.options.help man > docs/elaunch.1
.TH ELAUNCH 1 "" "elaunch" "User Commands"
.SH NAME
elaunch \\- start PyTorch training jobs and keep them alive"""
_PAGES = (
    ("run",),
    ("submit", "slurm"),
    ("submit", "k8s"),
    *((name,) for name in COMMANDS if name not in ("run", "submit")),
)


def manual() -> str:
    """The manual page as roff source, in ASCII."""
    parts = [_MAN_HEAD]
    for command in _PAGES:
        heading = "SYNOPSIS AND OPTIONS" if command == ("run",) else f"ELAUNCH {' '.join(command).upper()}"
        parts += [f".SH {heading}", ".nf", *map(roff, _help_of(command).splitlines()), ".fi"]
    return "\n".join(parts) + "\n"


def _help_of(command: tuple[str, ...]) -> str:
    text = io.StringIO()
    with (
        redirect_stdout(text),
        suppress(click.exceptions.Exit),
        ELAUNCH.make_context("elaunch", [*command, "--help"], obj=ParseState()) as ctx,
    ):
        ELAUNCH.invoke(ctx)
    return text.getvalue()


def roff(text: str) -> str:
    """`text` as one line of roff that prints as it is: no request, no escape, no character beyond ASCII."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("~", "\\(ti")
    line = "".join(letter if letter.isascii() else f"\\[u{ord(letter):04X}]" for letter in escaped)
    return f"\\&{line}" if line.startswith(".") else line


if __name__ == "__main__":
    print(manual() if sys.argv[1:] == ["man"] else markdown(), end="")
