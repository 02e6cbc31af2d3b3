"""`elaunch` itself: its commands. A command's module is imported when it is called."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click
from click.shell_completion import CompletionItem

from elaunch.launcher.options.command_line import HELP

# Each command: where it is, and a few words about it.
COMMANDS = {
    "doctor": ("doctor.command:COMMAND", "can this node train, with the options of a job?"),
    "run": ("options.options:RUN", "start a job; may be left out"),
    "store": ("store.command:COMMAND", "serve a store for jobs of several nodes"),
    "submit": ("options.commands:SUBMIT", "hand a job to a scheduler"),
    "status": ("inspect.status:STATUS", "show how a running job is doing"),
    "top": ("inspect.top:TOP", "show a running job, refreshed each second"),
    "stacks": ("inspect.job_command:STACKS", "show where every rank of a running job is"),
    "stop": ("inspect.job_command:STOP", "end a running job on all nodes, as Ctrl-C does"),
    "restart": ("inspect.job_command:RESTART", "start the workers of a running job again"),
    "warm": ("warm_command:COMMAND", "show or end what stays for the next start"),
    "rehearse": ("rehearse.command:COMMAND", "what does a failure cost a script, and does it change the result?"),
    "report": ("inspect.report:COMMAND", "make a page that shows what happened in a run"),
}
_SCHEDULERS = {
    "slurm": ("schedulers.submit_slurm:COMMAND", "write a batch script, and submit it with sbatch"),
    "k8s": ("schedulers.submit_kubernetes:COMMAND", "create a Job with kubectl"),
}


class _Commands(click.Group):
    """Commands that are imported by name."""

    def __init__(self, name: str, places: Mapping[str, tuple[str, str]], text: str = "", **settings: Any) -> None:
        super().__init__(name, add_help_option=False, no_args_is_help=False, **settings)
        self.places, self._text = places, text

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(self._text)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.places:
            return None
        module, _, name = self.places[cmd_name][0].partition(":")
        found: click.Command = getattr(importlib.import_module(f"elaunch.launcher.{module}"), name)
        return found

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        return [
            CompletionItem(name, help=text) for name, (_, text) in self.places.items() if name.startswith(incomplete)
        ]


class _Elaunch(_Commands):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args and args[0] in self.places else ["run", *args])


_SUBMIT = """\
Usage: elaunch submit slurm [options] [elaunch options] train.py args…
       elaunch submit k8s [options] [elaunch options] train.py args…

Write the job for a cluster's scheduler and submit it; with --dry-run, only show it.
elaunch submit slurm --help and elaunch submit k8s --help list the options.
Start a script called submit with elaunch ./submit.
"""
SUBMIT = _Commands("submit", _SCHEDULERS, _SUBMIT, params=[HELP])
ELAUNCH = _Elaunch("elaunch", COMMANDS)
