"""The manual page docs/elaunch.1: the texts of --help of all commands, as man shows them."""

from __future__ import annotations

import io
from contextlib import redirect_stdout, suppress

import click

from elaunch.launcher.options.command_line import Reading
from elaunch.launcher.options.commands import COMMANDS, ELAUNCH

_HEAD = """\
.\\" Made from the texts of --help: python -m elaunch.launcher.options.man > docs/elaunch.1
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
    """The page as roff source, in ASCII."""
    parts = [_HEAD]
    for words in _PAGES:
        heading = "SYNOPSIS AND OPTIONS" if words == ("run",) else f"ELAUNCH {' '.join(words).upper()}"
        parts += [f".SH {heading}", ".nf", *map(roff, _help(words).splitlines()), ".fi"]
    return "\n".join(parts) + "\n"


def _help(words: tuple[str, ...]) -> str:
    text = io.StringIO()
    with (
        redirect_stdout(text),
        suppress(click.exceptions.Exit),
        ELAUNCH.make_context("elaunch", [*words, "--help"], obj=Reading()) as ctx,
    ):
        ELAUNCH.invoke(ctx)
    return text.getvalue()


def roff(text: str) -> str:
    """`text` as one line of roff that prints as it is: no request, no escape, no character beyond ASCII."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("~", "\\(ti")
    line = "".join(letter if letter.isascii() else f"\\[u{ord(letter):04X}]" for letter in escaped)
    return f"\\&{line}" if line.startswith(".") else line


if __name__ == "__main__":
    print(manual(), end="")
