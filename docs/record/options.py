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
# What torchrun does differently, by option, and by setting of the rendezvous. Its backends lack the settings with –.
DIFFERS = {
    "nproc-per-node": "default 1; gpu is CUDA's only",
    "max-restarts": "default 0; each agent has its own budget",
    "stop-grace": "whole seconds; not kept on restarts",
    "signals-to-handle": "exits on USR1 and USR2 without ending the workers; ignores unknown names",
    "log-dir": "default always a new one; its folders have no date; writes files only with -r or -t",
    "log-line-prefix-template": "from torch 2.14 on",
    "redirects": "ranks up to 9 only",
    "tee": "default 0; ranks up to 9 only",
    "numa-binding": "needs numactl",
    "role": "takes ps=1 as a name",
    "run-id": "default none, the same for all jobs",
    "standalone": "with --nnodes 2 it waits for another node, which cannot come",
    "rdzv-endpoint": "one only; with static it is MASTER_ADDR:MASTER_PORT, here too, and the store is one port higher",
    "rdzv-backend": "default static; its c10d is not etcd, its etcd uses v2 only",
    "rdzv-conf": "other keys; unknown ones are ignored",
    "master-addr": "default 127.0.0.1",
    "master-port": "static only; default 29500",
    "local-addr": "default the host's full name",
    "run-path": "runs the script by runpy, in a child of the agent",
}
_SETTING_DIFFERS = {
    "join_timeout": "timeout: c10d ignores it",
    "last_call_timeout": "default 30, at every start",
    "keep_alive_interval": "a silent node is dropped without a message",
    "is_host": "c10d only",
    "etcd_prefix": "default /torchelastic/p2p",
    "read_timeout": "a single read of the store",
    **dict.fromkeys(("lease_ttl", "store_timeout", "keys_ttl", "transport", "user", "password_file"), "–"),
}
_HAS_AN_EFFECT = "has an effect"
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
    differs = _SETTING_DIFFERS.get(setting.name, _HAS_AN_EFFECT if setting.no_effect else "")
    return f"| {names} | {meaning} | {differs} |"


def _row(option: Option) -> str:
    names = [f"`-{option.short}`"] if option.short else []
    names += [f"`--{name} {option.metavar or ''}".rstrip() + "`" for name in option.names]
    unlike = _HAS_AN_EFFECT if option.no_effect else ""
    peer = DIFFERS.get(option.long) or ("–" if option.peer is None else unlike)
    own = f"PET_{option.long.upper().replace('-', '_')}"
    others = [f"`{name}`" for name in option.variables if name != own and option.long not in ("help", "version")]
    variables = f"; also {', '.join(others)}" if others else ""
    return f"| {', '.join(names)} | {option.help}{variables} | {peer} |"


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
