"""Commands of elaunch without a process of their own."""

from __future__ import annotations

import click

from elaunch.launcher.options.command_line import Command, ParseState


def read(command: Command, *argv: str, **environ: str) -> click.Context:
    """The context of a command line."""
    return command.make_context(f"elaunch {command.name}", list(argv), obj=ParseState(environ))


def call(command: Command, *argv: str, **environ: str) -> int:
    """Do what a command line asks for; the exit code."""
    code: int = command.invoke(read(command, *argv, **environ))
    return code
