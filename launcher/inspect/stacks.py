"""`elaunch stacks`: where every rank is, equal stacks together."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import click

from elaunch.agent.diagnosis.stack_groups import full_text, group_words, grouped, place_words
from elaunch.launcher.inspect.job_command import JSON, VERSION, job_command
from elaunch.launcher.inspect.job_source import JobSource, NodeStacks
from elaunch.launcher.inspect.text import plural
from elaunch.rendezvous.job_spec import job_name
from elaunch.rendezvous.texts import plain


def _main(ctx: click.Context, source: JobSource) -> int:
    taken = source.stacks()
    sys.stdout.write(json.dumps(stacks_record(taken)) + "\n" if ctx.params["json"] else stacks_text(taken))
    return 0


STACKS = job_command(
    "stacks",
    [JSON],
    """Show where every rank of a running job is: the stacks of all workers on all nodes, equal ones together.
py-spy reads them from outside; the workers go on.""",
    _main,
)


def stacks_text(taken: NodeStacks) -> str:
    """What `elaunch stacks` prints: a line for each group, then the groups' stacks in full."""
    groups = grouped(taken.stacks)
    what = f"{plural(len(taken.stacks), 'rank')} at {'the same place' if len(groups) == 1 else f'{len(groups)} places'}"
    lines = [f"{job_name(taken.run_id)}: {what if groups else 'no worker runs now'}"]
    lines += [f"  {group_words(group)}" for group in groups]
    lines += [*taken.silent, *taken.notes]
    lines += ["", *full_text(taken.stacks).splitlines()] if groups else []
    return "".join(f"{plain(line)}\n" for line in lines)


def stacks_record(taken: NodeStacks) -> dict[str, Any]:
    """The object of `--json`; docs/observe.md has its schema."""
    groups = []
    for group in grouped(taken.stacks):
        stack = asdict(group.stack)
        del stack["rank"]
        groups.append({"ranks": list(group.ranks), "where": place_words(group.stack), "stack": stack})
    return {
        "version": VERSION,
        "run_id": taken.run_id,
        "groups": groups,
        "silent": list(taken.silent),
        "notes": list(taken.notes),
    }
