"""Print docs/options.md, or the manual page docs/elaunch.1, which are made from the table of options.

    python docs/record/options.py > docs/options.md
    python docs/record/options.py man > docs/elaunch.1

A test holds both equal to what this script prints.
"""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stdout, suppress

import click

from elaunch.launcher.options.command_line import COMMANDS, ELAUNCH, Group, Option, ParseState
from elaunch.launcher.options.rdzv_conf import SETTINGS, Setting
from elaunch.launcher.options.table import TABLE

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

`python docs/record/options.py > docs/options.md` makes this page from `launcher/options/table.py`."""
_SETTINGS_HEAD = """\
## Settings of the rendezvous

Keys of `--rdzv-conf`, for jobs of several nodes. Other keys are refused."""
_COLUMNS = ("| option | meaning | torchrun |", "|---|---|---|")


def markdown() -> str:
    """The page docs/options.md."""
    rows = [_PAGE_HEAD]
    for group in Group:
        rows += ["", f"## {group.value}", "", *_COLUMNS]
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
.\\" Made from the texts of --help: python docs/record/options.py man > docs/elaunch.1
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
